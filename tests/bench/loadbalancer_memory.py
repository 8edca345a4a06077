"""What 1,000 load balancers with checks cost a real agent in memory: taken one by one, and again after its start with all of them."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from hostagent.protocol.network import ProbeWanted
from tests import namespaces
from tests.agent.balancing import ip
from tests.agent.conftest import Served
from tests.bench.loadbalancer_edge import SERVICES, service
from tests.bench.loadbalancer_stage import PORT

MINUTE = ProbeWanted(kind="tcp", interval_ms=60_000, timeout_ms=1000)


def resident_mib() -> dict[str, float]:
    """Of `serve` and of its rules' helper, and the most that `serve` ever had after a start with all documents."""
    with namespaces.own():
        return asyncio.run(_measure())


async def _measure() -> dict[str, float]:
    root = Path(tempfile.mkdtemp(prefix="bp-"))
    served = Served(root)
    served.paths.config.mkdir(parents=True)
    served.paths.host_config.write_text('supervisor = "plain"\n')
    ip("route", "add", "local", "10.0.0.0/8", "dev", "lo")  # every backend is here, and well
    backends = await asyncio.start_server(lambda _, writer: writer.transport.abort(), "0.0.0.0", PORT, backlog=4096)
    try:
        await served.start()
        client = await served.client()
        for number in range(SERVICES):
            await client.call("loadbalancer.ensure", replace(service(number), probe=MINUTE))
        assert served.process is not None
        found = {"serve_mib": _mib(served.process.pid, "VmRSS"), "helper_mib": _mib(_helper(served.process.pid), "VmRSS")}
        await served.kill()
        served.clients.clear()
        await served.start()
        assert served.process is not None
        await asyncio.sleep(3)  # the first checks are made
        found |= {
            "serve_started_mib": _mib(served.process.pid, "VmRSS"),
            "serve_most_mib": _mib(served.process.pid, "VmHWM"),
        }
        await served.stop()
        return found
    finally:
        backends.close()
        shutil.rmtree(root, ignore_errors=True)


def _helper(pid: int) -> int:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"nft_helper" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise RuntimeError("the agent has no helper")


def _mib(pid: int, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


if __name__ == "__main__":
    print(os.getloadavg()[0], resident_mib())
