"""Volumes by qemu-storage-daemon: encrypted qcow2 layers on a read-only base, one daemon a volume, exported as vhost-user-blk.

The one rule: the daemon is brought down in order (export deleted, event seen, quit); re-adding an export under a connected
machine and then quitting aborts version 7.2. What a daemon opens is told over its monitor, keys among it: no argument and no
file holds one.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import os
import time
from pathlib import Path

from hostagent.drivers.machine.protocol import DiskTransport
from hostagent.drivers.storage import layers, luks, qsd_chain, qsd_data, qsd_graph
from hostagent.drivers.storage.layers import Layers
from hostagent.drivers.storage.protocol import Holders, StorageTraits, VolumeObserved, VolumePlan, VolumeRendered
from hostagent.drivers.storage.qsd_graph import export_path
from hostagent.drivers.storage.qsd_merge import Merger
from hostagent.drivers.supervisor.protocol import SupervisorDriver, UnitLimits, UnitObserved, UnitWanted
from hostagent.lib import files, program
from hostagent.lib.hostconfig import DEFAULT_UID_BASE
from hostagent.lib.lock import KeyedLocks
from hostagent.lib.paths import Paths
from hostagent.lib.qmp import Qmp, QmpError, connect
from hostagent.lib.wait import until
from hostagent.protocol.errors import AgentError
from hostagent.protocol.wanted import VolumeWanted

DAEMON = "/usr/bin/qemu-storage-daemon"
PREFIX = "volume-"
READY_SECONDS = 20.0
EXPORT_GONE_SECONDS = 10.0
OPEN_SECONDS = 30.0
LOG_TAIL_BYTES = 500
GROWN = "grown"
OPEN = "open"
READY = "ready"
LISTENING = 0x10000  # __SO_ACCEPTCON


class QsdStorage:
    traits = StorageTraits(name="qsd", transports=frozenset({"vhost_user_blk", "file"}), can_snapshot=True, can_encrypt=True)

    def __init__(self, supervisor: SupervisorDriver, paths: Paths, *, merge_uid: int = DEFAULT_UID_BASE - 1) -> None:
        """`merge_uid`: whom the program that merges closed layers runs as; nobody else's."""
        self.supervisor = supervisor
        self.paths = paths
        self.changing = KeyedLocks()
        self.sharing = asyncio.Lock()
        self._merger = Merger(self, merge_uid)

    def render(self, plan: VolumePlan) -> VolumeRendered:
        return VolumeRendered(create=(), unit=_unit(plan))

    async def observe(self, volume_id: str) -> VolumeObserved | None:
        directory = self.paths.volume_directory(volume_id)
        found = qsd_data.found_in(directory)
        if found is None:
            return None
        unit = await self.supervisor.observe(PREFIX + volume_id)
        run = self.paths.volume_run_directory(volume_id)
        transport: DiskTransport = "file" if _has(run, "disk.raw") else "vhost_user_blk"
        is_exported = _is_serving(unit, run)
        return VolumeObserved(
            volume_id=volume_id,
            state="exported" if is_exported else "idle",
            size_bytes=qsd_data.qcow2_size(directory / found.top.file),
            transport=transport,
            path=export_path(run, transport),
            is_encrypted=found.is_encrypted,
            is_growth_pending=is_exported and (run / GROWN).exists(),
            layers=len(found.layers),
            incarnation=unit.incarnation if unit else None,
        )

    async def apply(self, plan: VolumePlan) -> VolumeObserved:
        async with self.changing.hold(plan.volume.id):  # the volume's own job and its machine's may come at once
            return await self._apply(plan)

    async def _apply(self, plan: VolumePlan) -> VolumeObserved:
        found = qsd_data.found_in(plan.directory)
        if found is None:
            async with self.sharing:
                found = await qsd_data.create(plan)
        elif layers.read(plan.directory) is None:  # made before there were layers
            found = dataclasses.replace(found, base_format=plan.base_format if plan.base is not None else "")
            layers.write(plan.directory, found)
        is_used = is_connected(export_path(plan.run_directory, "vhost_user_blk"))
        if is_used and plan.is_exported and plan.run_directory.stat().st_uid != plan.uid:
            raise AgentError("volume.in_use", f"the machine that had {plan.volume.id} before has not let go of it yet")
        if not is_used and (not plan.is_exported or self._is_outdated(plan)):
            await self.stop(plan.volume.id)
        size_bytes = qsd_data.qcow2_size(plan.directory / found.top.file)
        if plan.volume.size_bytes < size_bytes:
            words = f"{plan.volume.id} has {size_bytes} bytes, {plan.volume.size_bytes} are less"
            raise AgentError("volume.shrink_refused", words, retryable=False)
        if _is_serving(await self.supervisor.observe(PREFIX + plan.volume.id), plan.run_directory):
            await self._change(plan, found, size_bytes, is_used=is_used)
        elif plan.is_exported or size_bytes < plan.volume.size_bytes:
            await self._export(plan, found)
            if not plan.is_exported:
                await self.stop(plan.volume.id)
        observed = await self.observe(plan.volume.id)
        assert observed is not None
        return observed

    async def withdraw(self, volume_id: str) -> None:
        async with self.changing.hold(volume_id):
            if is_connected(export_path(self.paths.volume_run_directory(volume_id), "vhost_user_blk")):
                raise AgentError("volume.in_use", f"a machine still uses {volume_id}")
            await self.stop(volume_id)

    async def remove(self, volume_id: str) -> None:
        await self.withdraw(volume_id)
        async with self.changing.hold(volume_id):
            files.remove_tree(self.paths.volume_run_directory(volume_id))
            files.remove_tree(self.paths.volume_directory(volume_id))

    async def volume_ids(self) -> tuple[str, ...]:
        top = self.paths.state / "volume"
        found = {path.parent.name for name in (layers.FILE, layers.FIRST) for path in top.glob(f"*/{name}")}
        units = await self.supervisor.names()
        return tuple(sorted(found | {name.removeprefix(PREFIX) for name in units if name.startswith(PREFIX)}))

    async def stop(self, volume_id: str) -> None:
        """The export down in order, its daemon gone. Absent is success."""
        unit = await self.supervisor.observe(PREFIX + volume_id)
        run = self.paths.volume_run_directory(volume_id)
        if unit is not None and unit.state == "running":
            try:
                async with connect(run / "qmp.sock") as qmp:
                    if (run / READY).exists():
                        await qmp.execute("block-export-del", {"id": qsd_graph.EXPORT, "mode": "hard"})
                        await qmp.wait_for("BLOCK_EXPORT_DELETED", seconds=EXPORT_GONE_SECONDS)
                    await qmp.execute("quit")
            except QmpError:
                pass  # the supervisor's stop signal follows; qcow2 is consistent at any point
        for mark in (READY, OPEN):
            (run / mark).unlink(missing_ok=True)
        await self.supervisor.remove(PREFIX + volume_id)
        await _unmount(export_path(run, "file"))

    async def snapshot(self, plan: VolumePlan, snapshot_id: str, directory: Path) -> None:
        """The written layer is closed for it, and a fresh one goes on top. The order on disk comes before the switch: a daemon
        that dies in between begins with the fresh layer, which then holds nothing yet.
        """
        async with self.changing.hold(plan.volume.id):
            found = layers.read(plan.directory)
            if found is None:
                raise AgentError("volume.missing", f"volume {plan.volume.id} has no layers yet")
            await self.align(plan, found)  # before the size of what is written is looked at
            if found.closed_for(snapshot_id) is None:
                found = await qsd_data.add_layer(plan, found, snapshot_id)
                await self.align(plan, found)
            index = found.closed_for(snapshot_id)
            assert index is not None
            closed = plan.directory / found.layers[index].file
            files.give(closed, os.geteuid(), os.getegid(), 0o444)
            kept = dataclasses.replace(
                found,
                layers=found.layers[: index + 1],
                size_bytes=qsd_data.qcow2_size(closed),
                volume_id=plan.volume.id,
                taken_unix_ms=time.time_ns() // 1_000_000,
            )
            async with self.sharing:
                layers.share(plan.directory, directory, kept.names)
                directory.chmod(0o700)
                layers.write(directory, kept)

    async def drop_snapshot(self, snapshot_id: str, holders: Holders) -> None:
        await self._merger.drop(snapshot_id, holders)

    async def align(self, plan: VolumePlan, found: Layers) -> None:
        """A running daemon writes to the top layer: an agent may have died, or a snapshot been taken back, before it did."""
        if not await self.is_open(plan.volume.id):
            return
        try:
            async with connect(plan.run_directory / "qmp.sock") as qmp:
                await qsd_chain.align(qmp, plan.directory, found)
        except QmpError as error:
            raise AgentError("volume.snapshot_failed", f"{plan.volume.id}: {error}") from error

    async def is_open(self, volume_id: str) -> bool:
        """Whether its daemon runs with its layers open, exported or not."""
        unit, run = await self.supervisor.observe(PREFIX + volume_id), self.paths.volume_run_directory(volume_id)
        return unit is not None and unit.state == "running" and ((run / OPEN).exists() or (run / READY).exists())

    async def open(self, plan: VolumePlan, found: Layers) -> None:
        """Its daemon runs with its layers open, serving nobody yet if it did not run before. The caller holds the lock."""
        if not await self.is_open(plan.volume.id):
            await self._export(plan, found, is_served=False)

    def is_served_as_file(self, volume_id: str) -> bool:
        """By FUSE, which keeps a right to resize that no merging allows beside itself."""
        run = self.paths.volume_run_directory(volume_id)
        return (run / READY).exists() and _has(run, export_path(run, "file").name)

    async def rest(self, volume_id: str) -> None:
        """End a daemon that serves nobody."""
        async with self.changing.hold(volume_id):
            if not (self.paths.volume_run_directory(volume_id) / READY).exists():
                await self.stop(volume_id)

    def _is_outdated(self, plan: VolumePlan) -> bool:
        """Whether the export is another machine's, or shows a size from before a growth."""
        run_directory = plan.run_directory
        if not run_directory.exists():
            return False
        other = "file" if plan.transport == "vhost_user_blk" else "vhost_user_blk"
        is_others = run_directory.stat().st_uid != plan.uid or _has(run_directory, export_path(run_directory, other).name)
        return is_others or (run_directory / GROWN).exists()

    async def _change(self, plan: VolumePlan, found: Layers, size_bytes: int, *, is_used: bool) -> None:
        """What a running daemon takes on. A connected machine sees a new size after its next start: the export of version 7.2
        announces nothing.
        """
        if size_bytes < plan.volume.size_bytes and not is_used:
            await self.stop(plan.volume.id)
            await self._export(plan, found)
            return
        try:
            async with connect(plan.run_directory / "qmp.sock") as qmp:
                wanted = {
                    "path": f"/objects/{qsd_graph.LIMITS}",
                    "property": "limits",
                    "value": qsd_graph.limits(plan.volume.qos),
                }
                await qmp.execute("qom-set", wanted)
                await qsd_chain.align(qmp, plan.directory, found)
                if size_bytes < plan.volume.size_bytes:
                    await qsd_chain.halt(qmp)
                    await _resize(qmp, plan.volume)
                    (plan.run_directory / GROWN).touch()
        except QmpError as error:
            raise AgentError("volume.export_failed", f"{plan.volume.id}: {error}") from error

    async def _export(self, plan: VolumePlan, found: Layers, *, is_served: bool = True) -> None:
        needed = {layer.key_id for layer in found.layers if layer.key_id}
        if missing := sorted(needed - plan.keys.keys()):
            raise AgentError("volume.locked", f"{plan.volume.id} waits for its keys", needs=missing)
        await self.supervisor.remove(PREFIX + plan.volume.id)
        await _unmount(export_path(plan.run_directory, "file"))
        qsd_data.prepare(plan, found)
        await self.supervisor.apply(_unit(plan))
        await self._until_ready(plan)
        try:
            async with connect(plan.run_directory / "qmp.sock") as qmp:
                for key_id in sorted(needed):
                    data = base64.b64encode(luks.passphrase_of(plan.keys[key_id])).decode()
                    secret = {"qom-type": "secret", "id": qsd_graph.secret_of(key_id), "data": data, "format": "base64"}
                    await qmp.execute("object-add", secret)
                for command, arguments in qsd_graph.graph(plan.volume, plan.directory, found):
                    await qmp.execute(command, arguments, seconds=OPEN_SECONDS)
                if qsd_data.qcow2_size(plan.directory / found.top.file) < plan.volume.size_bytes:
                    await _resize(qmp, plan.volume)
                (plan.run_directory / OPEN).touch()
                if not is_served:
                    return
                await qmp.execute(*qsd_graph.export(plan.volume, plan.run_directory, plan.transport))
        except QmpError as error:
            await self.supervisor.remove(PREFIX + plan.volume.id)
            words = f"{error}; {files.tail(plan.log_path, LOG_TAIL_BYTES)}"
            raise AgentError("disk.full" if "No space left" in words else "volume.export_failed", words) from error
        (plan.run_directory / READY).touch()

    async def _until_ready(self, plan: VolumePlan) -> None:
        """The daemon writes its pid file when its monitor is up."""

        async def is_ready() -> bool:
            if (plan.run_directory / "pid").exists():
                return True
            unit = await self.supervisor.observe(PREFIX + plan.volume.id)
            if unit is None or unit.state == "exited":
                raise AgentError(
                    "volume.export_failed", f"the storage daemon ended: {files.tail(plan.log_path, LOG_TAIL_BYTES)}"
                )
            return False

        if not await until(is_ready, seconds=READY_SECONDS):
            raise AgentError("volume.export_failed", f"the storage daemon was not ready in {READY_SECONDS} s")


def _unit(plan: VolumePlan) -> UnitWanted:
    run = plan.run_directory
    argv = [DAEMON, "--pidfile", str(run / "pid")]
    argv += ["--chardev", f"socket,path={run / 'qmp.sock'},server=on,wait=off,id=qmp", "--monitor", "chardev=qmp"]
    argv += ["--object", "iothread,id=io"]
    is_fuse = plan.transport == "file"  # mounting needs root
    return UnitWanted(
        name=PREFIX + plan.volume.id,
        argv=tuple(argv),
        uid=0 if is_fuse else plan.uid,
        gid=0 if is_fuse else plan.gid,
        log_path=plan.log_path,
        limits=UnitLimits(tasks=64),
    )


def _is_serving(unit: UnitObserved | None, run: Path) -> bool:
    return unit is not None and unit.state == "running" and (run / READY).exists()


def _has(directory: Path, name: str) -> bool:
    """Also of a mount whose daemon was killed, which cannot be looked at."""
    return directory.is_dir() and any(entry.name == name for entry in directory.iterdir())


async def _unmount(path: Path) -> None:
    """What a killed daemon left of its FUSE export. Nothing there is success."""
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    if any(line.split(" ")[4] == str(path) for line in mounts):
        await program.run("umount", "-l", str(path))


def is_connected(path: Path) -> bool:
    """Whether a client is connected to this UNIX socket, or waits to be: any entry of it in /proc/net/unix that does not
    listen (flag 0x10000).
    """
    for line in Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[7] == str(path) and not int(fields[3], 16) & LISTENING:
            return True
    return False


async def _resize(qmp: Qmp, volume: VolumeWanted) -> None:
    """By the topmost node: one that stands above what was resized goes on believing in the old size."""
    await qmp.execute("block_resize", {"node-name": qsd_graph.ROOT, "size": volume.size_bytes}, seconds=OPEN_SECONDS)
