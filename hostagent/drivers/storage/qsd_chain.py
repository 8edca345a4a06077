"""The layers that a running daemon really stands on, and how they are changed under its export.

The one rule: the daemon is asked, never believed: an agent may have died between any two words to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hostagent.drivers.storage import qsd_graph
from hostagent.drivers.storage.layers import BASE, Layer, Layers
from hostagent.lib.qmp import Qmp, QmpError
from hostagent.lib.wait import until

MERGE = "merge"
HALT_SECONDS = 20.0
OPEN_SECONDS = 30.0
FLUSH_SECONDS = 120.0


async def chain_of(qmp: Qmp) -> tuple[str, ...]:
    """The nodes below the export, the written one first, the base last; filters are left out."""
    graph = await qmp.execute("x-debug-query-block-graph")
    names = {node["id"]: node["name"] for node in graph["nodes"] if node["type"] == "block-driver"}
    below: dict[str, dict[str, str]] = {}
    for edge in graph["edges"]:
        if edge["parent"] in names and edge["child"] in names:
            below.setdefault(names[edge["parent"]], {})[edge["name"]] = names[edge["child"]]
    chain: list[str] = []
    node: str | None = below.get(qsd_graph.ROOT, {}).get("file")
    while node is not None:
        children = below.get(node, {})
        if qsd_graph.number_of(node) >= 0 or node == BASE:
            chain.append(node)
            node = children.get("backing")
        else:
            node = children.get("file") or children.get("backing")
    return tuple(chain)


async def align(qmp: Qmp, directory: Path, found: Layers) -> None:
    """The daemon writes to the top layer from now on, if it does not already. Raises QmpError."""
    chain = await chain_of(qmp)
    numbers = [layer.number for layer in found.layers]
    if not chain or qsd_graph.number_of(chain[0]) not in numbers:
        raise QmpError("other", f"the daemon writes to {chain[:1]}, which is none of {numbers}")
    written = chain[0]
    fresh = found.layers[numbers.index(qsd_graph.number_of(written)) + 1 :]
    if fresh:
        await halt(qmp)
    for layer in fresh:
        await _add(qmp, directory, layer, qsd_graph.node_of(layer), below=None, is_read_only=False)
        await qmp.execute("blockdev-snapshot", {"node": written, "overlay": qsd_graph.node_of(layer)})
        written = qsd_graph.node_of(layer)


async def halt(qmp: Qmp) -> None:
    """End what is being merged; what was copied already stays. A later one goes on."""
    if not await is_merging(qmp):
        return
    try:
        await qmp.execute("block-job-cancel", {"device": MERGE, "force": True})
    except QmpError as error:
        if error.kind != "DeviceNotActive":
            raise

    async def is_over() -> bool:
        return not await is_merging(qmp)

    if not await until(is_over, seconds=HALT_SECONDS):
        raise QmpError("timeout", f"merging did not end in {HALT_SECONDS:g} s")


async def is_merging(qmp: Qmp) -> bool:
    return any(job["id"] == MERGE for job in await qmp.execute("query-jobs"))


async def begin_lift(qmp: Qmp, found: Layers, index: int, *, bytes_per_second: int) -> bool:
    """Copy layer `index` into the written one above it, in the background. False: that is done already."""
    chain = await chain_of(qmp)
    place = _place(chain, found.layers[index])
    if place is None:
        return False
    if await is_merging(qmp):
        return True
    job: dict[str, Any] = {"job-id": MERGE, "device": chain[place - 1], "speed": bytes_per_second}
    if place + 1 < len(chain):
        job |= {"base-node": chain[place + 1], "backing-file": ""}  # no file names another one
    await qmp.execute("block-stream", job)
    return True


async def finish_lift(qmp: Qmp, found: Layers, index: int) -> bool:
    """What was copied is on stable storage. False: it was not copied to the end."""
    chain = await chain_of(qmp)
    if await is_merging(qmp) or _place(chain, found.layers[index]) is not None:
        return False
    below = next(iter(chain[1:]), None)
    await _put_on(qmp, found.layers[index + 1], next(iter(chain)), below=below, is_read_only=False)
    return True


async def replace_pair(qmp: Qmp, directory: Path, found: Layers, index: int) -> None:
    """Layer `index` took in the one above it: what is above both stands upon it, read anew from its file."""
    chain = await chain_of(qmp)
    place = _place(chain, found.layers[index + 1])
    if place is None:
        return
    nodes = {node["node-name"] for node in await qmp.execute("query-named-block-nodes", {"flat": True})}
    lower = found.layers[index]
    fresh = next(name for version in range(1, len(nodes) + 2) if (name := qsd_graph.node_of(lower, version)) not in nodes)
    at = _place(chain, lower)
    assert at is not None
    below = chain[at + 1] if at + 1 < len(chain) else None
    await _add(qmp, directory, lower, fresh, below=below, is_read_only=True)
    above = next(layer for layer in found.layers if layer.number == qsd_graph.number_of(chain[place - 1]))
    await _put_on(qmp, above, chain[place - 1], below=fresh, is_read_only=place > 1)


async def drop_unused(qmp: Qmp) -> None:
    """Close the files of layers that nothing stands upon any more, which frees them."""
    chain = await chain_of(qmp)
    nodes = [node["node-name"] for node in await qmp.execute("query-named-block-nodes", {"flat": True})]
    unused = [node for node in nodes if qsd_graph.number_of(node) >= 0 and node not in chain]
    for node in sorted(unused, key=qsd_graph.number_of, reverse=True):
        await qmp.execute("blockdev-del", {"node-name": node})
    used = {f"{node}_file" for node in chain}
    for node in nodes:
        if node.endswith("_file") and qsd_graph.number_of(node.removesuffix("_file")) >= 0 and node not in used:
            await qmp.execute("blockdev-del", {"node-name": node})


def _place(chain: tuple[str, ...], layer: Layer) -> int | None:
    return next((at for at, node in enumerate(chain) if qsd_graph.number_of(node) == layer.number), None)


async def _add(qmp: Qmp, directory: Path, layer: Layer, name: str, *, below: str | None, is_read_only: bool) -> None:
    nodes = {node["node-name"] for node in await qmp.execute("query-named-block-nodes", {"flat": True})}
    for command, arguments in qsd_graph.layer_words(directory, layer, name, below=below, is_read_only=is_read_only):
        if arguments["node-name"] not in nodes:
            await qmp.execute(command, arguments, seconds=OPEN_SECONDS)


async def _put_on(qmp: Qmp, layer: Layer, node: str, *, below: str | None, is_read_only: bool) -> None:
    """Reopening flushes it, its tables among it."""
    options = qsd_graph.layer_node(layer, node, below=below, is_read_only=is_read_only)
    await qmp.execute("blockdev-reopen", {"options": [options]}, seconds=FLUSH_SECONDS)
