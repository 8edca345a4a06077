"""A guest of a few megabytes on the agent's real drivers: a kernel, busybox, a shell on the serial port.

The one rule: what a guest sees of its disks is asked in the guest.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import struct

from hostagent.drivers.machine import kvm
from hostagent.drivers.machine.qemu import QemuMachine
from hostagent.drivers.registry import fake_drivers
from hostagent.drivers.storage.qsd import QsdStorage
from hostagent.lib.hostconfig import HostConfig
from hostagent.lib.paths import Paths
from hostagent.lib.wait import until
from hostagent.protocol.results import Failed, Succeeded
from hostagent.protocol.wanted import (
    DiskWanted,
    FileWanted,
    Generation,
    ImageWanted,
    KernelBoot,
    SeedWanted,
    VmWanted,
    VolumeWanted,
)
from hostagent.verbs import image as images
from hostagent.verbs import vm, volume
from hostagent.verbs.context import Agent, open_agent
from provisioning.images.build import build
from provisioning.images.manifest import read_manifest
from tests.conformance.conftest import Daemon

MIB = 1 << 20
VM, IMAGE = "vm_1", "img_1"
BOOT_SECONDS = 120
TOLD_SECONDS = 60
INIT = b"""#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys
/bin/busybox --install -s /bin
export PATH=/bin
mount -t devtmpfs devtmpfs /dev
mount -t proc proc /proc
mount -t sysfs sysfs /sys
while read -r module; do insmod "/lib/$module"; done < /modules
exec < /dev/ttyS0 > /dev/ttyS0 2>&1
stty raw -echo
echo guest-is-up
while read -r number line; do eval "$line"; echo "<$number:$?>"; done
"""


class Guest:
    """One agent, one machine `vm_1`, its volumes by `volume`."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.disks: tuple[str, ...] = ()
        self._numbers = itertools.count(1)
        self._words = itertools.count(1)
        self._console: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def qsd(self) -> QsdStorage:
        found = self.agent.drivers.storages["qsd"]
        assert isinstance(found, QsdStorage)
        return found

    def document(self, **changed: object) -> VmWanted:
        boot = KernelBoot(
            kernel_file="vmlinux", initramfs_file="initramfs", cmdline="console=ttyS0 loglevel=4 panic=5 reboot=t"
        )
        wanted = VmWanted(
            id=VM,
            generation=Generation(epoch=1, number=next(self._numbers)),
            driver="qemu",
            vcpus=1,
            memory_bytes=256 * MIB,
            image_id=IMAGE,
            boot=boot,
            disks=tuple(DiskWanted(volume_id=name) for name in self.disks),
            nics=(),
            seed=SeedWanted(hostname="small"),
        )
        return dataclasses.replace(wanted, **changed)

    async def has(self, *volume_ids: str) -> None:
        """The machine's document names these disks, and is carried out."""
        self.disks = volume_ids
        await self.settled(vm.ensure, self.document())

    async def volume(self, volume_id: str, **changed: object) -> dict[str, object]:
        generation = Generation(epoch=1, number=next(self._numbers))
        wanted = dataclasses.replace(VolumeWanted(id=volume_id, generation=generation, size_bytes=32 * MIB), **changed)
        return (await self.settled(volume.ensure, wanted)).observed

    async def settled(self, verb, document) -> Succeeded:
        results = []

        async def is_settled() -> bool:
            result = (await verb(self.agent, document)).result
            results.append(result)
            assert not isinstance(result, Failed) or result.retryable, result
            return isinstance(result, Succeeded)

        assert await until(is_settled, seconds=TOLD_SECONDS), results[-1]
        return results[-1]

    async def is_up(self, *, times: int = 1, seconds: float = BOOT_SECONDS) -> None:
        """Until its shell reads from the serial port, for the first time or after that many starts."""
        await self.close()
        path = self.agent.paths.vm_run_directory(VM) / "console.sock"
        self._console = await asyncio.open_unix_connection(str(path), limit=MIB)
        log = self.agent.paths.vm_log(VM)

        async def has_spoken() -> bool:
            return log.read_bytes().count(b"guest-is-up") >= times

        assert await until(has_spoken, seconds=seconds), log.read_text(errors="replace")[-2000:]
        await self.does("true")

    async def does(self, words: str, *, seconds: float = TOLD_SECONDS) -> str:
        """What the guest's shell answered; the words must succeed."""
        said, code = await self.tries(words, seconds=seconds)
        assert code == 0, (words, said)
        return said

    async def tries(self, words: str, *, seconds: float = TOLD_SECONDS) -> tuple[str, int]:
        assert self._console is not None
        reader, writer = self._console
        number = next(self._words)
        writer.write(f"{number} {words}\n".encode())
        await writer.drain()
        async with asyncio.timeout(seconds):
            said = await reader.readuntil(f"<{number}:".encode())
            code = await reader.readuntil(b">")
        text = said.decode(errors="replace").rpartition("<")[0]
        return text.strip(), int(code[:-1])

    async def close(self) -> None:
        if self._console is not None:
            self._console[1].close()
            self._console = None


async def open_guest(paths: Paths, daemon: Daemon) -> Guest:
    """Nothing runs yet."""
    machine = QemuMachine(daemon.driver, paths, tsc_khz=kvm.tsc_khz(), power_off_seconds=1.0)
    storage = QsdStorage(daemon.driver, paths)
    drivers = dataclasses.replace(
        fake_drivers(), supervisor=daemon.driver, machines={"qemu": machine}, storages={"qsd": storage}
    )
    agent = await open_agent(paths, HostConfig(), drivers, version="test")
    agent.settle_seconds = 20.0
    guest = Guest(agent)
    image = build()
    manifest = read_manifest(image)
    initramfs = (image / manifest.boot.initramfs_file).read_bytes() + archive("init", INIT)
    contents = {"vmlinux": (image / manifest.boot.kernel_file).read_bytes(), "initramfs": initramfs}
    files = []
    paths.blobs.mkdir(parents=True)
    for name, content in contents.items():
        digest = hashlib.sha256(content).hexdigest()
        (paths.blobs / digest).write_bytes(content)
        (paths.blobs / digest).chmod(0o644)
        files.append(FileWanted(name=name, sha256=digest, size_bytes=len(content)))
    wanted = ImageWanted(id=IMAGE, generation=Generation(epoch=1, number=1), purpose="guest", files=tuple(files))
    await guest.settled(images.ensure, wanted)
    return guest


async def close_guest(guest: Guest) -> None:
    await guest.close()
    await guest.agent.jobs.close()
    await guest.agent.drivers.machines["qemu"].remove(VM)
    for volume_id in await guest.qsd.volume_ids():
        await guest.qsd.stop(volume_id)


def archive(name: str, content: bytes) -> bytes:
    """A second archive behind the first one; what it names again counts. Source: Linux, buffer-format.rst."""
    members = ((name, 0o100755, content), ("TRAILER!!!", 0, b""))
    whole = b""
    for label, mode, data in members:
        fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(label) + 1, 0)
        named = b"070701" + b"".join(struct.pack("8s", b"%08X" % field) for field in fields) + label.encode() + b"\0"
        whole += named.ljust(-(-len(named) // 4) * 4, b"\0") + data.ljust(-(-len(data) // 4) * 4, b"\0")
    return whole
