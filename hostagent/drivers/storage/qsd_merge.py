"""What a dropped snapshot leaves: a layer that was closed for it alone, merged with the one above it.

The one rule: at every point each holder's `layers.json` reads the same bytes, whatever dies. Two ways keep it: under a written
layer the closed one is *lifted* into it (block-stream, in the volume's own daemon), under a closed one it *takes in* what is
above it (qemu-img commit), which only those read who have the upper one too. The order is: all data on stable storage, the
running daemon moved off, `layers.json` written, the name taken away.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hostagent.drivers.storage import layers, luks, qsd_chain
from hostagent.drivers.storage.layers import Layer, Layers
from hostagent.drivers.storage.protocol import Holders, VolumePlan
from hostagent.lib import files, lock, program
from hostagent.lib.lock import KeyedLocks
from hostagent.lib.paths import Paths
from hostagent.lib.qmp import Qmp, QmpError, connect
from hostagent.lib.wait import until
from hostagent.protocol.errors import AgentError

BYTES_PER_SECOND = 512 << 20
MOST_TRIES = 10
KINDS = ("volume", "snapshot")
WORKPLACE = "merge"
MERGE_SECONDS = 6 * 3600.0


class Storage(Protocol):
    """What of the driver is needed here."""

    paths: Paths
    changing: KeyedLocks
    sharing: asyncio.Lock

    async def open(self, plan: VolumePlan, found: Layers) -> None: ...

    async def is_open(self, volume_id: str) -> bool: ...

    def is_served_as_file(self, volume_id: str) -> bool: ...

    async def rest(self, volume_id: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A volume or snapshot that has the closed layer, at `index`, and another one above it."""

    directory: Path
    found: Layers
    index: int
    is_volume: bool

    @property
    def lower(self) -> Layer:
        return self.found.layers[self.index]

    @property
    def upper(self) -> Layer:
        return self.found.layers[self.index + 1]

    @property
    def is_lifted(self) -> bool:
        """The layer above is the written one of a volume, which nobody else has."""
        return self.is_volume and self.upper == self.found.top


class Merger:
    """One merge at a time: it is the disk's time that is short."""

    def __init__(self, storage: Storage, uid: int) -> None:
        self._storage = storage
        self._uid = uid
        self._one = asyncio.Lock()

    async def drop(self, snapshot_id: str, holders: Holders) -> None:
        async with self._one:
            async with self._storage.sharing:
                self._holders(snapshot_id)
                files.remove_tree(self._storage.paths.snapshot_directory(snapshot_id))
            for _ in range(MOST_TRIES):
                found = self._holders(snapshot_id)
                if not found:
                    await self._sweep()
                    for top in {path.resolve().parents[1] for path in self._directories()}:
                        files.remove_tree(top / WORKPLACE / snapshot_id)
                    return
                if found[0].is_lifted:
                    await self._lift(found[0], snapshot_id, holders)
                else:
                    await self._take_in(found, snapshot_id, holders)
            raise AgentError("volume.merge_failed", f"{snapshot_id}: interrupted {MOST_TRIES} times")

    def _holders(self, snapshot_id: str) -> list[Holder]:
        """Raises AgentError `snapshot.in_use` where several volumes went on from it."""
        found: list[Holder] = []
        for directory in self._directories():
            held = layers.read(directory)
            index = held.closed_for(snapshot_id) if held else None
            if held is not None and index is not None and directory != self._storage.paths.snapshot_directory(snapshot_id):
                is_volume = directory.parent.name == "volume"
                found.append(Holder(directory=directory, found=held, index=index, is_volume=is_volume))
        above = {(status.st_dev, status.st_ino) for one in found for status in ((one.directory / one.upper.file).stat(),)}
        if len(above) > 1:
            names = ", ".join(one.directory.name for one in found)
            raise AgentError("snapshot.in_use", f"{names} began as {snapshot_id}", retryable=True)
        return found

    async def _lift(self, holder: Holder, snapshot_id: str, holders: Holders) -> None:
        """Into the written layer. Returns also when it was interrupted."""
        volume_id = holder.directory.name
        plan = await holders.plan(volume_id)
        if plan is None:
            raise AgentError("snapshot.in_use", f"{volume_id} stands on {snapshot_id} and is wanted by nobody")
        try:
            async with self._steady(holder, snapshot_id) as found:
                if found is None:
                    return
                await self._storage.open(plan, found.found)
                if self._storage.is_served_as_file(volume_id):
                    raise AgentError("volume.in_use", f"{volume_id} lets go of {snapshot_id} when its container has stopped")
                async with connect(plan.run_directory / "qmp.sock") as qmp:
                    await qsd_chain.align(qmp, plan.directory, found.found)
                    await qsd_chain.begin_lift(qmp, found.found, found.index, bytes_per_second=BYTES_PER_SECOND)
            await until(lambda: self._has_ended(plan), seconds=MERGE_SECONDS)
            async with self._steady(holder, snapshot_id) as found:
                if found is not None and await self._storage.is_open(volume_id):
                    async with connect(plan.run_directory / "qmp.sock") as qmp:
                        await self._finish_lift(qmp, plan, found)
            await self._storage.rest(volume_id)
        except QmpError as error:
            full = "No space left" in str(error)
            raise AgentError("disk.full" if full else "volume.merge_failed", f"{volume_id}: {error}") from error

    async def _finish_lift(self, qmp: Qmp, plan: VolumePlan, found: Holder) -> None:
        if not await qsd_chain.finish_lift(qmp, found.found, found.index):
            return
        kept = tuple(layer for layer in found.found.layers if layer != found.lower)
        layers.write(plan.directory, dataclasses.replace(found.found, layers=kept))

    async def _has_ended(self, plan: VolumePlan) -> bool:
        """Also where its daemon went meanwhile."""
        if not await self._storage.is_open(plan.volume.id):
            return True
        with contextlib.suppress(QmpError):
            async with connect(plan.run_directory / "qmp.sock") as qmp:
                return not await qsd_chain.is_merging(qmp)
        return True

    async def _sweep(self) -> None:
        """Files that no `layers.json` names any more: first the daemons close them, then their names go."""
        for directory in self._directories():
            if not layers.unnamed(directory):
                continue
            async with self._storage.changing.hold(directory.name):
                if directory.parent.name == "volume" and await self._storage.is_open(directory.name):
                    await self._tell(directory.name, qsd_chain.drop_unused)
                for path in layers.unnamed(directory):
                    files.remove(path)

    async def _tell(self, volume_id: str, what: Callable[[Qmp], Awaitable[None]]) -> None:
        try:
            async with connect(self._storage.paths.volume_run_directory(volume_id) / "qmp.sock") as qmp:
                await what(qmp)
        except QmpError as error:
            raise AgentError("volume.merge_failed", f"{volume_id}: {error}") from error

    async def _take_in(self, found: list[Holder], snapshot_id: str, holders: Holders) -> None:
        """Into the closed layer below, for all that have both."""
        lower, upper = found[0].lower, found[0].upper
        if lower.key_id != upper.key_id:
            raise AgentError("snapshot.in_use", f"{snapshot_id} rests under another key than what stands on it")
        keys = await holders.keys(found[0].directory) if lower.key_id else {}
        if lower.key_id and lower.key_id not in keys:
            raise AgentError("volume.locked", f"{snapshot_id} waits for the keys of what stands on it", needs=[lower.key_id])
        passphrase = luks.passphrase_of(keys[lower.key_id]) if lower.key_id else None
        place = found[0].directory.resolve().parents[1] / WORKPLACE / snapshot_id  # in the pool: links do not leave it
        await self._commit(found[0], place, passphrase)
        while remaining := self._holders(snapshot_id):  # a clone that was being made of it may come late
            for one in remaining:
                async with self._steady(one, snapshot_id) as now:
                    if now is None:
                        return
                    await self._relink(now)

    async def _commit(self, holder: Holder, place: Path, passphrase: bytes | None) -> None:
        """By a program that may open these two files and nothing else."""
        uid = self._uid if os.geteuid() == 0 else None
        owner = uid if uid is not None else os.geteuid()
        layers.share(holder.directory, place, (holder.lower.file, holder.upper.file))
        paths = {name: place / layer.file for name, layer in (("lower", holder.lower), ("upper", holder.upper))}
        for path in paths.values():
            files.give(path, owner, owner, 0o644)
        files.give(place, owner, owner, 0o700)
        what = json.dumps(_pair(paths["lower"], paths["upper"], is_encrypted=passphrase is not None))
        with self._alone() as alone, program.secret_input(passphrase or b"-", uid=owner if uid is not None else -1) as secret:
            argv = ("qemu-img", "commit", "-q", "-d", "--object", f"secret,id=key,file=/dev/fd/{secret}", f"json:{what}")
            try:
                await program.run(*argv, pass_fds=(secret, alone), deadline_seconds=MERGE_SECONDS, uid=uid)
            except AgentError as error:
                full = "No space left" in error.message
                raise AgentError("disk.full" if full else "volume.merge_failed", error.message) from error
        files.sync(paths["lower"])
        for path in paths.values():
            files.give(path, os.geteuid(), os.getegid(), 0o444)
        files.remove_tree(place)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[int]:
        """The program holds this lock too: it may outlive an agent that was killed, and no second one writes beside it."""
        try:
            descriptor = lock.hold(self._storage.paths.state / "merge.lock")
        except lock.AlreadyLocked as error:
            raise AgentError("volume.merge_failed", "what a former agent began is still merging") from error
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    async def _relink(self, one: Holder) -> None:
        """It goes without the upper layer from now on, its daemon first."""

        async def move(qmp: Qmp) -> None:
            await qsd_chain.align(qmp, one.directory, one.found)
            await qsd_chain.replace_pair(qmp, one.directory, one.found, one.index)

        async with self._storage.sharing:
            if one.is_volume and await self._storage.is_open(one.directory.name):
                await self._tell(one.directory.name, move)
            merged = dataclasses.replace(one.lower, snapshot_id=one.upper.snapshot_id)
            kept = (*one.found.layers[: one.index], merged, *one.found.layers[one.index + 2 :])
            layers.write(one.directory, dataclasses.replace(one.found, layers=kept))

    def _steady(self, holder: Holder, snapshot_id: str) -> AbstractAsyncContextManager[Holder | None]:
        """The holder as it is now, and stays while this is held; None: it has the layer no more, or no longer so."""

        @contextlib.asynccontextmanager
        async def held() -> AsyncIterator[Holder | None]:
            lock = self._storage.changing.hold(holder.directory.name) if holder.is_volume else contextlib.nullcontext()
            async with lock:
                found = layers.read(holder.directory)
                index = found.closed_for(snapshot_id) if found else None
                if found is None or index is None:
                    yield None
                    return
                now = dataclasses.replace(holder, found=found, index=index)
                yield now if now.upper.file == holder.upper.file and now.is_lifted == holder.is_lifted else None

        return held()

    def _directories(self) -> list[Path]:
        """Of everything that has layers."""
        found = (self._storage.paths.state / kind for kind in KINDS)
        return [path.parent for top in found for path in sorted(top.glob(f"*/{layers.FILE}"))]


def _pair(lower: Path, upper: Path, *, is_encrypted: bool) -> dict[str, Any]:
    """Without QEMU's locks: running daemons hold them, and what is written hides behind the upper one from them."""
    keyed = {"encrypt": {"format": "luks", "key-secret": "key"}} if is_encrypted else {}
    opened = [{"driver": "file", "filename": str(path), "locking": "off"} for path in (lower, upper)]
    below = {"driver": "qcow2", "file": opened[0], "backing": None, **keyed}
    return {"driver": "qcow2", "file": opened[1], "backing": below, **keyed}
