"""What Prometheus hears of volumes and pools. The one rule: a figure that nobody measures is absent, never estimated.

qemu-storage-daemon 7.2 counts no request and takes no time of any (its statistics stay 0 for nodes below an export), so there
is no latency of a `qsd` volume here; bytes are those that its daemon read and wrote.
"""

from __future__ import annotations

from pathlib import Path

from hostagent.lib import pools
from hostagent.protocol.errors import AgentError
from hostagent.verbs.context import Agent


async def lines(agent: Agent) -> list[str]:
    return _pools(agent) + await _volumes(agent)


def _pools(agent: Agent) -> list[str]:
    found = [pool for pool in pools.all_of(agent.paths) if pool.is_available]
    said: list[str] = []
    for name, values in (
        ("free", [pool.free_bytes for pool in found]),
        ("total", [pool.total_bytes for pool in found]),
    ):
        said.append(f"# TYPE bedplate_storage_pool_{name}_bytes gauge")
        pairs = zip(found, values, strict=True)
        said += [f'bedplate_storage_pool_{name}_bytes{{pool="{pool.name}"}} {value}' for pool, value in pairs]
    return said


async def _volumes(agent: Agent) -> list[str]:
    up: list[str] = []
    moved: dict[str, list[str]] = {"read": [], "write": []}
    for document in agent.documents.all("volume"):
        driver = agent.drivers.storages.get(document.backend)
        try:
            seen = await driver.observe(document.id) if driver is not None else None
        except AgentError:
            seen = None
        if seen is None:
            continue
        label = f'volume="{document.id}",backend="{document.backend}"'
        if seen.state == "exported":
            up.append(f"bedplate_storage_backend_up{{{label}}} {int(seen.incarnation is not None)}")
        if seen.incarnation is not None and seen.incarnation.pid:
            for name, value in _moved(seen.incarnation.pid).items():
                moved[name].append(f"bedplate_storage_volume_{name}_bytes_total{{{label}}} {value}")
    said = ["# TYPE bedplate_storage_backend_up gauge", *up]
    for name, found in moved.items():
        said += [f"# TYPE bedplate_storage_volume_{name}_bytes_total counter", *found]
    return said


def _moved(pid: int) -> dict[str, int]:
    """Source: proc_pid_io(5); nothing where the process ended."""
    try:
        text = Path(f"/proc/{pid}/io").read_text(encoding="ascii")
    except OSError:
        return {}
    values = dict(line.split(": ", 1) for line in text.splitlines())
    return {"read": int(values["rchar"]), "write": int(values["wchar"])}
