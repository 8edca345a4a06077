"""Volumes by qemu-storage-daemon: encrypted qcow2 layers on a read-only base, one daemon a volume, exported as vhost-user-blk.

The one rule: the daemon is brought down in order (export deleted, event seen, quit); re-adding an export under a connected
machine and then quitting aborts version 7.2. What a daemon opens is told over its monitor, keys among it: no argument and no
file holds one.
"""

from __future__ import annotations

import base64
import dataclasses
import os
import shutil
import time
from pathlib import Path

from hostagent.drivers.machine.protocol import DiskTransport
from hostagent.drivers.storage import layers, luks, qsd_graph
from hostagent.drivers.storage.layers import Layer, Layers
from hostagent.drivers.storage.protocol import StorageTraits, VolumeObserved, VolumePlan, VolumeRendered
from hostagent.drivers.storage.qsd_graph import export_path
from hostagent.drivers.supervisor.protocol import SupervisorDriver, UnitLimits, UnitObserved, UnitWanted
from hostagent.lib import files, program
from hostagent.lib.lock import KeyedLocks
from hostagent.lib.paths import Paths
from hostagent.lib.qmp import Qmp, QmpError, connect
from hostagent.lib.wait import until
from hostagent.protocol.errors import AgentError

DAEMON = "/usr/bin/qemu-storage-daemon"
PREFIX = "volume-"
READY_SECONDS = 20.0
EXPORT_GONE_SECONDS = 10.0
OPEN_SECONDS = 30.0
LOG_TAIL_BYTES = 500
GROWN = "grown"
READY = "ready"
LISTENING = 0x10000  # __SO_ACCEPTCON


class QsdStorage:
    traits = StorageTraits(name="qsd", transports=frozenset({"vhost_user_blk", "file"}), can_snapshot=True, can_encrypt=True)

    def __init__(self, supervisor: SupervisorDriver, paths: Paths) -> None:
        self.supervisor = supervisor
        self.paths = paths
        self._changing = KeyedLocks()

    def render(self, plan: VolumePlan) -> VolumeRendered:
        return VolumeRendered(create=(), unit=_unit(plan))

    async def observe(self, volume_id: str) -> VolumeObserved | None:
        directory = self.paths.volume_directory(volume_id)
        found = _found(directory)
        if found is None:
            return None
        unit = await self.supervisor.observe(PREFIX + volume_id)
        run = self.paths.volume_run_directory(volume_id)
        transport: DiskTransport = "file" if _has(run, "disk.raw") else "vhost_user_blk"
        is_exported = _is_serving(unit, run)
        return VolumeObserved(
            volume_id=volume_id,
            state="exported" if is_exported else "idle",
            size_bytes=qcow2_size(directory / found.top.file),
            transport=transport,
            path=export_path(run, transport),
            is_encrypted=found.is_encrypted,
            is_growth_pending=is_exported and (run / GROWN).exists(),
            layers=len(found.layers),
            incarnation=unit.incarnation if unit else None,
        )

    async def apply(self, plan: VolumePlan) -> VolumeObserved:
        async with self._changing.hold(plan.volume.id):  # the volume's own job and its machine's may come at once
            return await self._apply(plan)

    async def _apply(self, plan: VolumePlan) -> VolumeObserved:
        found = _found(plan.directory)
        if found is None:
            found = await _create(plan)
        elif layers.read(plan.directory) is None:  # made before there were layers
            found = dataclasses.replace(found, base_format=plan.base_format if plan.base is not None else "")
            layers.write(plan.directory, found)
        is_used = is_connected(export_path(plan.run_directory, plan.transport))
        if not is_used and (not plan.is_exported or self._is_outdated(plan)):
            await self.stop(plan.volume.id)
        size_bytes = qcow2_size(plan.directory / found.top.file)
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

    async def remove(self, volume_id: str) -> None:
        async with self._changing.hold(volume_id):
            run = self.paths.volume_run_directory(volume_id)
            if is_connected(export_path(run, "vhost_user_blk")):
                raise AgentError("volume.in_use", f"a machine still uses {volume_id}")
            await self.stop(volume_id)
            shutil.rmtree(run, ignore_errors=True)
            shutil.rmtree(self.paths.volume_directory(volume_id) / "keys", ignore_errors=True)
            shutil.rmtree(self.paths.volume_directory(volume_id), ignore_errors=True)

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
        (run / READY).unlink(missing_ok=True)
        await self.supervisor.remove(PREFIX + volume_id)
        await _unmount(export_path(run, "file"))

    async def snapshot(self, plan: VolumePlan, snapshot_id: str, directory: Path) -> None:
        """The written layer is closed for it, and a fresh one goes on top. The order on disk comes before the switch: a daemon
        that dies in between begins with the fresh layer, which then holds nothing yet.
        """
        async with self._changing.hold(plan.volume.id):
            found = layers.read(plan.directory)
            if found is None:
                raise AgentError("volume.missing", f"volume {plan.volume.id} has no layers yet")
            if snapshot_id not in {layer.snapshot_id for layer in found.layers}:
                found = await _add_layer(plan, found, snapshot_id)
            index = next(at for at, layer in enumerate(found.layers) if layer.snapshot_id == snapshot_id)
            if _is_serving(await self.supervisor.observe(PREFIX + plan.volume.id), plan.run_directory):
                await self._switch(plan, found, index + 1)
            closed = plan.directory / found.layers[index].file
            files.give(closed, os.geteuid(), os.getegid(), 0o444)
            kept = dataclasses.replace(
                found,
                layers=found.layers[: index + 1],
                size_bytes=qcow2_size(closed),
                volume_id=plan.volume.id,
                taken_unix_ms=time.time_ns() // 1_000_000,
            )
            layers.share(plan.directory, directory, kept.names)
            directory.chmod(0o700)
            layers.write(directory, kept)

    async def _switch(self, plan: VolumePlan, found: Layers, index: int) -> None:
        """The daemon writes to this layer from now on, if it does not already."""
        try:
            async with connect(plan.run_directory / "qmp.sock") as qmp:
                nodes = {node["node-name"] for node in await qmp.execute("query-named-block-nodes", {"flat": True})}
                name = qsd_graph.node_of(index)
                for command, arguments in qsd_graph.layer_words(plan.directory, found.layers[index], index, below=None):
                    if arguments["node-name"] not in nodes:
                        await qmp.execute(command, arguments)
                try:
                    await qmp.execute("blockdev-snapshot", {"node": qsd_graph.node_of(index - 1), "overlay": name})
                except QmpError as error:
                    if f"backing hd of '{name}'" not in str(error):  # else an agent that died here had done it
                        raise
        except QmpError as error:
            raise AgentError("volume.snapshot_failed", f"{plan.volume.id}: {error}") from error

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
                if size_bytes < plan.volume.size_bytes:
                    await _resize(qmp, plan, found)
                    (plan.run_directory / GROWN).touch()
        except QmpError as error:
            raise AgentError("volume.export_failed", f"{plan.volume.id}: {error}") from error

    async def _export(self, plan: VolumePlan, found: Layers) -> None:
        needed = {layer.key_id for layer in found.layers if layer.key_id}
        if missing := sorted(needed - plan.keys.keys()):
            raise AgentError("volume.locked", f"{plan.volume.id} waits for its keys", needs=missing)
        await self.supervisor.remove(PREFIX + plan.volume.id)
        await _unmount(export_path(plan.run_directory, "file"))
        _prepare(plan, found)
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
                if qcow2_size(plan.directory / found.top.file) < plan.volume.size_bytes:
                    await _resize(qmp, plan, found)
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


def _found(directory: Path) -> Layers | None:
    """Its layers; of a volume from before there were any, its one plain file."""
    found = layers.read(directory)
    if found is None and (directory / layers.FIRST).exists() and not (directory / "keys").exists():
        return Layers(layers=(Layer(file=layers.FIRST),))
    return found


async def _create(plan: VolumePlan) -> Layers:
    plan.directory.mkdir(parents=True, exist_ok=True)
    found = Layers(layers=())
    if plan.source is not None:
        source = layers.read(plan.source)
        if source is None:
            raise AgentError("volume.source_missing", f"the snapshot {plan.source.name} is not here", retryable=False)
        if plan.volume.size_bytes < source.size_bytes:
            raise AgentError("volume.shrink_refused", "a clone is not smaller than its snapshot", retryable=False)
        layers.share(plan.source, plan.directory, source.names)
        found = dataclasses.replace(source, volume_id="", taken_unix_ms=0)
    elif plan.base is not None:
        _link_base(plan)
        found = dataclasses.replace(found, base_format=plan.base_format)
    return await _add_layer(plan, found, "")


async def _add_layer(plan: VolumePlan, found: Layers, snapshot_id: str) -> Layers:
    """An empty layer on top; the one below it is closed for the snapshot."""
    is_first = not any(layer.key_id == plan.volume.id for layer in found.layers)
    key_id = plan.volume.id if plan.volume.id in plan.keys else ""
    if not snapshot_id and is_first and plan.volume.id in plan.missing_keys:
        raise AgentError("volume.locked", f"{plan.volume.id} waits for its keys", needs=[plan.volume.id])
    if snapshot_id and found.top.key_id and not key_id:
        raise AgentError("volume.locked", f"{plan.volume.id} waits for its keys", needs=[found.top.key_id])
    index = len(found.layers)
    layer = Layer(file=f"disk.{index}.qcow2" if index else layers.FIRST, key_id=key_id)
    size_bytes = qcow2_size(plan.directory / found.top.file) if snapshot_id else plan.volume.size_bytes
    passphrase = luks.passphrase_of(plan.keys[key_id]) if key_id else None
    files.write_atomically(plan.directory / layer.file, await luks.empty_disk(size_bytes, passphrase))
    files.give(plan.directory / layer.file, plan.uid, plan.gid, 0o600)
    below = found.layers
    if snapshot_id:
        below = (*below[:-1], dataclasses.replace(found.top, snapshot_id=snapshot_id))
    fresh = dataclasses.replace(found, layers=(*below, layer))
    layers.write(plan.directory, fresh)
    return fresh


def _prepare(plan: VolumePlan, found: Layers) -> None:
    """The machine's uid may write its disk and no more: names in the volume's directory are read back as root."""
    plan.run_directory.mkdir(parents=True, exist_ok=True)
    for stale in plan.run_directory.iterdir():
        stale.unlink()
    files.give(plan.run_directory, plan.uid, plan.gid, 0o700)
    files.give(plan.directory, os.geteuid(), plan.gid, 0o750)
    files.give(plan.directory / found.top.file, plan.uid, plan.gid, 0o600)
    if plan.transport == "file":
        export_path(plan.run_directory, plan.transport).touch(mode=0o600)


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


def _link_base(plan: VolumePlan) -> None:
    """The volume's own name for its base, so that removing the image never pulls it from under a disk."""
    assert plan.base is not None
    link = plan.directory / layers.BASE
    link.unlink(missing_ok=True)
    try:
        link.hardlink_to(plan.base.resolve())
    except FileNotFoundError as error:
        raise AgentError("volume.base_missing", f"{plan.base} is not on this host", retryable=False) from error
    except OSError:
        link.symlink_to(plan.base.resolve())


def qcow2_size(disk: Path) -> int:
    """The virtual size in bytes: big-endian, 8 bytes at offset 24 (QEMU, docs/interop/qcow2.txt)."""
    with disk.open("rb") as file:
        header = file.read(32)
    if header[:4] != b"QFI\xfb":
        raise AgentError("volume.damaged", f"{disk} is not a qcow2 file", retryable=False)
    return int.from_bytes(header[24:32], "big")


def is_connected(path: Path) -> bool:
    """Whether a client is connected to this UNIX socket, or waits to be: any entry of it in /proc/net/unix that does not
    listen (flag 0x10000).
    """
    for line in Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[7] == str(path) and not int(fields[3], 16) & LISTENING:
            return True
    return False


async def _resize(qmp: Qmp, plan: VolumePlan, found: Layers) -> None:
    node = qsd_graph.node_of(len(found.layers) - 1)
    await qmp.execute("block_resize", {"node-name": node, "size": plan.volume.size_bytes}, seconds=OPEN_SECONDS)
