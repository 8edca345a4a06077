"""What `storage verify` says of this host's volumes: where each lies, what it is made of, what its daemon really writes to.

The one rule: it only looks, and needs neither the service nor a control plane.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from hostagent.drivers.storage import layers, qsd_chain, qsd_data, qsd_graph
from hostagent.drivers.storage.layers import Layers
from hostagent.lib import pools
from hostagent.lib.paths import Paths
from hostagent.lib.qmp import QmpError, connect
from hostagent.protocol.errors import AgentError

ASKED_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """`daemon`: `serving`, `open` (nobody is served) or `none`. `writes_to`: the file, by its daemon, else by `layers.json`."""

    id: str
    pool: str
    directory: str
    files: tuple[str, ...] = ()
    size_bytes: int = 0
    daemon: str = "none"
    writes_to: str = ""
    problems: tuple[str, ...] = ()


async def verify(paths: Paths) -> list[Verified]:
    return [await _one(paths, path.name) for path in sorted((paths.state / "volume").glob("*"))]


async def _one(paths: Paths, volume_id: str) -> Verified:
    directory = paths.volume_directory(volume_id)
    about = Verified(id=volume_id, pool=pools.pool_of(paths, "volume", volume_id), directory=str(directory.resolve()))
    try:
        pools.check(paths, "volume", volume_id)
        found = layers.read(directory)
    except AgentError as error:
        return dataclasses.replace(about, problems=(error.message,))
    if found is None:
        return dataclasses.replace(about, problems=("it has no layers.json",))
    problems = [f"{name} is missing" for name in found.names if not (directory / name).exists()]
    problems += [f"{path.name} is no layer of it" for path in layers.unnamed(directory)]
    size_bytes = 0
    try:
        size_bytes = qsd_data.qcow2_size(directory / found.top.file)
    except (OSError, AgentError) as error:
        problems.append(str(error))
    daemon, written = await _daemon(paths.volume_run_directory(volume_id), found, problems)
    return dataclasses.replace(
        about, files=found.names, size_bytes=size_bytes, daemon=daemon, writes_to=written, problems=tuple(problems)
    )


async def _daemon(run: Path, found: Layers, problems: list[str]) -> tuple[str, str]:
    if not (run / "qmp.sock").exists():
        return "none", found.top.file
    try:
        async with connect(run / "qmp.sock", seconds=ASKED_SECONDS) as qmp:
            chain = await qsd_chain.chain_of(qmp)
            is_serving = bool(await qmp.execute("query-block-exports"))
    except QmpError as error:
        problems.append(f"its daemon does not answer: {error}")
        return "none", found.top.file
    numbers = [number for node in chain if (number := qsd_graph.number_of(node)) >= 0]
    names = {layer.number: layer.file for layer in found.layers}
    if numbers != [layer.number for layer in reversed(found.layers)]:
        problems.append(f"its daemon stands on layers {numbers}, layers.json names {sorted(names, reverse=True)}")
    written = names.get(numbers[0], f"layer {numbers[0]}") if numbers else ""
    return "serving" if is_serving else "open", written


def text(found: list[Verified]) -> str:
    """For people: a line each, its problems below."""
    lines: list[str] = []
    for one in found:
        lines.append(f"{one.id}  pool {one.pool}  {one.size_bytes} bytes  {one.daemon}  {one.directory}/{one.writes_to}")
        lines += [f"    {problem}" for problem in one.problems]
    return "\n".join(lines or ["no volumes"])
