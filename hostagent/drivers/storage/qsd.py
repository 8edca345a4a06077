"""Volumes by qemu-storage-daemon: a qcow2 overlay on a read-only base, one daemon a volume, exported as vhost-user-blk.

The one rule: the daemon is brought down in order (export deleted, event seen, quit); re-adding an export under a connected
machine and then quitting aborts version 7.2. Formats are always named, never detected: a guest writes its disk's first bytes.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from hostagent.drivers.machine.protocol import DiskTransport
from hostagent.drivers.storage.protocol import StorageTraits, VolumeObserved, VolumePlan, VolumeRendered
from hostagent.drivers.supervisor.protocol import SupervisorDriver, UnitLimits, UnitWanted
from hostagent.lib import files
from hostagent.lib.lock import KeyedLocks
from hostagent.lib.paths import Paths
from hostagent.lib.program import run
from hostagent.lib.qmp import QmpError, connect
from hostagent.lib.wait import until
from hostagent.protocol.errors import AgentError

IMG = "/usr/bin/qemu-img"
DAEMON = "/usr/bin/qemu-storage-daemon"
SETPRIV = "/usr/bin/setpriv"
PREFIX = "volume-"
READY_SECONDS = 20.0
CREATE_SECONDS = 120.0
EXPORT_GONE_SECONDS = 10.0
LOG_TAIL_BYTES = 500
DISK = "disk.qcow2"
GROWN = "grown"
LISTENING = 0x10000  # __SO_ACCEPTCON


class QsdStorage:
    traits = StorageTraits(name="qsd", transports=frozenset({"vhost_user_blk", "file"}))

    def __init__(self, supervisor: SupervisorDriver, paths: Paths) -> None:
        self.supervisor = supervisor
        self.paths = paths
        self._changing = KeyedLocks()

    def render(self, plan: VolumePlan) -> VolumeRendered:
        disk = plan.directory / DISK
        create = (IMG, "create", "-q", "-f", "qcow2")
        if plan.base is not None:
            create += ("-b", str(_base_link(plan)), "-F", plan.base_format)
        create += (str(_fresh(disk)), str(plan.volume.size_bytes))
        return VolumeRendered(create=(create,), unit=_unit(plan, disk))

    async def observe(self, volume_id: str) -> VolumeObserved | None:
        disk = self.paths.volume_directory(volume_id) / DISK
        if not disk.exists():
            return None
        unit = await self.supervisor.observe(PREFIX + volume_id)
        run = self.paths.volume_run_directory(volume_id)
        transport: DiskTransport = "file" if (run / "disk.raw").exists() else "vhost_user_blk"
        path = export_path(run, transport)
        is_exported = unit is not None and unit.state == "running" and path.exists()
        return VolumeObserved(
            volume_id=volume_id,
            state="exported" if is_exported else "idle",
            size_bytes=qcow2_size(disk),
            transport=transport,
            path=path,
        )

    async def apply(self, plan: VolumePlan) -> VolumeObserved:
        async with self._changing.hold(plan.volume.id):  # the volume's own job and its machine's may come at once
            return await self._apply(plan)

    async def _apply(self, plan: VolumePlan) -> VolumeObserved:
        disk = plan.directory / DISK
        if not disk.exists():
            await self._create(plan, disk)
        if self._is_outdated(plan) and not is_connected(export_path(plan.run_directory, plan.transport)):
            await self.stop(plan.volume.id)
        await self._grow(plan, disk)
        await self._export(plan, disk)
        observed = await self.observe(plan.volume.id)
        assert observed is not None
        return observed

    async def remove(self, volume_id: str) -> None:
        async with self._changing.hold(volume_id):
            await self._remove(volume_id)

    async def _remove(self, volume_id: str) -> None:
        run = self.paths.volume_run_directory(volume_id)
        if is_connected(export_path(run, "vhost_user_blk")):
            raise AgentError("volume.in_use", f"a machine still uses {volume_id}")
        await self.stop(volume_id)
        shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(self.paths.volume_directory(volume_id), ignore_errors=True)

    async def volume_ids(self) -> tuple[str, ...]:
        found = {path.parent.name for path in (self.paths.state / "volume").glob(f"*/{DISK}")}
        units = await self.supervisor.names()
        return tuple(sorted(found | {name.removeprefix(PREFIX) for name in units if name.startswith(PREFIX)}))

    async def stop(self, volume_id: str) -> None:
        """The export down in order, its daemon gone. Absent is success."""
        unit = await self.supervisor.observe(PREFIX + volume_id)
        if unit is not None and unit.state == "running":
            try:
                async with connect(self.paths.volume_run_directory(volume_id) / "qmp.sock") as qmp:
                    await qmp.execute("block-export-del", {"id": "export", "mode": "hard"})
                    await qmp.wait_for("BLOCK_EXPORT_DELETED", seconds=EXPORT_GONE_SECONDS)
                    await qmp.execute("quit")
            except QmpError:
                pass  # the supervisor's stop signal follows; qcow2 is consistent at any point
        await self.supervisor.remove(PREFIX + volume_id)

    async def _create(self, plan: VolumePlan, disk: Path) -> None:
        plan.directory.mkdir(parents=True, exist_ok=True)
        if plan.base is not None:
            _link_base(plan)
        for argv in self.render(plan).create:
            await _image_tool(argv)
        _fresh(disk).chmod(0o600)
        _fresh(disk).rename(disk)

    def _is_outdated(self, plan: VolumePlan) -> bool:
        """Whether the export is another machine's, or shows a size from before a growth."""
        run_directory = plan.run_directory
        if not run_directory.exists():
            return False
        other = "file" if plan.transport == "vhost_user_blk" else "vhost_user_blk"
        is_others = run_directory.stat().st_uid != plan.uid or export_path(run_directory, other).exists()
        return is_others or (run_directory / GROWN).exists()

    async def _grow(self, plan: VolumePlan, disk: Path) -> None:
        """A connected machine sees the new size after its next start (version 7.2 announces nothing)."""
        size, wanted = qcow2_size(disk), plan.volume.size_bytes
        if wanted < size:
            raise AgentError("volume.shrink_refused", f"{plan.volume.id} has {size} bytes, {wanted} are less", retryable=False)
        if wanted == size:
            return
        unit = await self.supervisor.observe(PREFIX + plan.volume.id)
        if unit is None or unit.state != "running":
            await _resize(disk, wanted)
        elif is_connected(export_path(plan.run_directory, plan.transport)):
            async with connect(plan.run_directory / "qmp.sock") as qmp:
                await qmp.execute("block_resize", {"node-name": "disk", "size": wanted})
            (plan.run_directory / GROWN).touch()
        else:
            await self.stop(plan.volume.id)
            await _resize(disk, wanted)

    async def _export(self, plan: VolumePlan, disk: Path) -> None:
        unit = await self.supervisor.observe(PREFIX + plan.volume.id)
        path = export_path(plan.run_directory, plan.transport)
        if unit is not None and unit.state == "running" and path.exists():
            return
        await self.supervisor.remove(PREFIX + plan.volume.id)
        plan.run_directory.mkdir(parents=True, exist_ok=True)
        for stale in plan.run_directory.iterdir():
            stale.unlink()
        # the machine's uid may write its disk and no more: names in the volume's directory are read back as root
        files.give(plan.run_directory, plan.uid, plan.gid, 0o700)
        files.give(plan.directory, os.geteuid(), plan.gid, 0o750)
        files.give(disk, plan.uid, plan.gid, 0o600)
        if plan.transport == "file":
            path.touch(mode=0o600)
        rendered = self.render(plan)
        assert rendered.unit is not None
        await self.supervisor.apply(rendered.unit)
        await self._until_ready(plan)

    async def _until_ready(self, plan: VolumePlan) -> None:
        """The daemon writes its pid file when its exports are up."""

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


def export_path(run_directory: Path, transport: DiskTransport) -> Path:
    return run_directory / ("disk.sock" if transport == "vhost_user_blk" else "disk.raw")


def _unit(plan: VolumePlan, disk: Path) -> UnitWanted:
    run = plan.run_directory
    nodes: list[dict[str, object]] = [_file_node("disk_file", disk, is_read_only=False)]
    disk_node: dict[str, object] = {"driver": "qcow2", "node-name": "disk", "file": "disk_file", "discard": "unmap"}
    if plan.base is not None:
        nodes.append(_file_node("base_file", _base_link(plan), is_read_only=True))
        nodes.append({"driver": plan.base_format, "node-name": "base", "file": "base_file", "read-only": True})
        disk_node["backing"] = "base"
    else:
        disk_node["backing"] = None
    export: dict[str, object] = {"id": "export", "node-name": "disk", "writable": True}
    if plan.transport == "vhost_user_blk":
        address = {"type": "unix", "path": str(export_path(run, plan.transport))}
        export |= {"type": "vhost-user-blk", "addr": address, "num-queues": plan.volume.num_queues, "iothread": "io"}
    else:
        export |= {"type": "fuse", "mountpoint": str(export_path(run, plan.transport)), "growable": False}
    argv = [DAEMON, "--pidfile", str(run / "pid")]
    argv += ["--chardev", f"socket,path={run / 'qmp.sock'},server=on,wait=off,id=qmp", "--monitor", "chardev=qmp"]
    argv += ["--object", "iothread,id=io"]
    for node in [*nodes, disk_node]:
        argv += ["--blockdev", json.dumps(node)]
    argv += ["--export", json.dumps(export)]
    is_fuse = plan.transport == "file"  # mounting needs root
    return UnitWanted(
        name=PREFIX + plan.volume.id,
        argv=tuple(argv),
        uid=0 if is_fuse else plan.uid,
        gid=0 if is_fuse else plan.gid,
        log_path=plan.log_path,
        limits=UnitLimits(tasks=64),
    )


def _file_node(name: str, path: Path, *, is_read_only: bool) -> dict[str, object]:
    node: dict[str, object] = {"driver": "file", "node-name": name, "filename": str(path), "read-only": is_read_only}
    if not is_read_only:
        node["discard"] = "unmap"
    return node


def _fresh(disk: Path) -> Path:
    return disk.with_suffix(".new")


def _base_link(plan: VolumePlan) -> Path:
    """The volume's own name for its base, so that removing the image never pulls it from under a disk."""
    return plan.directory / "base"


def _link_base(plan: VolumePlan) -> None:
    assert plan.base is not None
    link = _base_link(plan)
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


async def _resize(disk: Path, size_bytes: int) -> None:
    """By the disk's owner: a machine that broke out may have written a header that names another file as its data."""
    owner, group = disk.stat().st_uid, disk.parent.stat().st_gid
    rights = (SETPRIV, f"--reuid={owner}", f"--regid={group}", "--clear-groups", "--inh-caps=-all", "--")
    resize = (IMG, "resize", "-q", "-f", "qcow2", str(disk), str(size_bytes))
    await _image_tool(resize if owner == os.geteuid() else (*rights, *resize))


async def _image_tool(argv: tuple[str, ...]) -> None:
    try:
        await run(*argv, deadline_seconds=CREATE_SECONDS)
    except AgentError as error:
        if "No space left" in error.message:
            raise AgentError("disk.full", error.message) from error
        raise
