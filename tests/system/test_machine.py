"""Real VMs on lab hosts through the agent alone: boot, login, crash, reboot, power, purge."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hostagent.lib.wait import until
from hostagent.protocol.wanted import (
    DiskWanted,
    FileWanted,
    Generation,
    ImageWanted,
    KernelBoot,
    NetworkWanted,
    NicWanted,
    RouteWanted,
    SeedWanted,
    VmWanted,
    VolumeWanted,
)
from provisioning.images.build import build
from provisioning.images.manifest import read_manifest
from provisioning.lab import Lab, LabHost
from tests.system.agenthost import AgentHost, can_connect

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.caps("root", "netns", "sshd", "qemu", "qsd", "debootstrap"),
]

VM, VOLUME, IMAGE = "vm_01hf7yat00000000000000m1", "vol_01hf7yat00000000000000m1", "img_01hf7yat00000000000000m1"
IPV4, IPV6 = "10.91.0.5", "fd00:91::5"
BOOT_SECONDS = 90
KEY = "/root/.ssh/vm"


def generation(number: int) -> Generation:
    return Generation(epoch=1, number=number)


NIC = NicWanted(id="nic_01hf7yat00000000000000m1", generation=generation(1), mac="06:00:00:00:91:05", ipv4=IPV4, ipv6=IPV6)


@pytest.fixture(scope="module")
def image_directory() -> Path:
    return build()


@pytest.fixture
async def host(lab: Lab) -> AsyncIterator[AgentHost]:
    """Host a, with the agent."""
    made = AgentHost(lab.host("a"))
    if not made.socket.exists():
        made.install()
    await made.ready()
    return made


def image_wanted(directory: Path) -> ImageWanted:
    files = tuple(FileWanted(name=f.name, sha256=f.sha256, size_bytes=f.size_bytes) for f in read_manifest(directory).files)
    return ImageWanted(id=IMAGE, generation=generation(1), purpose="guest", files=files)


def vm_wanted(directory: Path, key: str) -> VmWanted:
    manifest = read_manifest(directory)
    boot = KernelBoot(
        kernel_file=manifest.boot.kernel_file, initramfs_file=manifest.boot.initramfs_file, cmdline=manifest.boot.cmdline
    )
    return VmWanted(
        id=VM,
        generation=generation(1),
        driver="qemu",
        vcpus=1,
        memory_bytes=max(256 << 20, manifest.min_memory_bytes),
        image_id=IMAGE,
        boot=boot,
        disks=(DiskWanted(volume_id=VOLUME, is_boot=True),),
        nics=(NIC,),
        seed=SeedWanted(hostname="real", ssh_authorized_keys=(key,)),
    )


def make_key(host: LabHost) -> str:
    """On the host from which the machine is reached."""
    host.exec(["sh", "-c", f"test -f {KEY} || ssh-keygen -q -t ed25519 -N '' -f {KEY}"])
    return host.exec(["cat", f"{KEY}.pub"]).stdout.decode().strip()


def ssh(*command: str) -> list[str]:
    options = [
        "StrictHostKeyChecking=no",
        "UserKnownHostsFile=/dev/null",
        "ConnectTimeout=5",
        "BatchMode=yes",
        "LogLevel=ERROR",
    ]
    flags = [word for option in options for word in ("-o", option)]
    return ["ssh", "-F", "none", "-i", KEY, *flags, f"debian@{IPV4}", *command]


def route_to(lab: Lab) -> NetworkWanted:
    via = lab.host("a").record
    routes = (
        RouteWanted(destination_cidr=f"{IPV4}/32", via=via.address),
        RouteWanted(destination_cidr=f"{IPV6}/128", via=via.address_ipv6),
    )
    return NetworkWanted(id="routes", generation=generation(1), routes=routes)


async def logged_in(other: LabHost, *, seconds: float = BOOT_SECONDS) -> str:
    """The guest's boot id, over SSH from another host."""
    command = ssh("cat", "/proc/sys/kernel/random/boot_id")
    return (await asyncio.to_thread(can_connect, other, command, seconds=seconds)).stdout.decode().strip()


async def test_a_machine_lives_its_whole_life(lab, host, image_directory):
    """Long, because one boot is dear and each part goes on with the machine that the last one left."""
    other = AgentHost(lab.host("b"))
    other.install()
    await other.ready()
    await other.ensure("network", route_to(lab))
    before = host.leftovers()
    wanted = vm_wanted(image_directory, make_key(other.host))

    await host.put_image(image_wanted(image_directory), image_directory)
    volume = VolumeWanted(
        id=VOLUME,
        generation=generation(1),
        size_bytes=read_manifest(image_directory).min_disk_bytes,
        image_id=IMAGE,
        image_file=read_manifest(image_directory).root_file,
    )
    await host.ensure("volume", volume)
    started = time.monotonic()
    await host.ensure("vm", wanted)
    boots = [await logged_in(other.host)]
    print(f"launch_to_ssh: {time.monotonic() - started:.1f} s")
    for command in (["ping", "-c1", "-W5", IPV4], ["ping", "-6", "-c1", "-W5", IPV6]):
        can_connect(other.host, command, seconds=20)
    assert other.host.exec(ssh("hostname")).stdout.decode().strip() == "real"
    other.host.exec(ssh("echo kept > kept; sync"), timeout=30)

    # killed from outside: restarted without the control plane
    pid = (await host.vm(VM)).detail["pid"]
    in_host(host.host, pid, signal.SIGKILL)
    killed = time.monotonic()
    observed = await host.until_vm(VM, "running", seconds=15, not_pid=pid)
    print(f"killed_to_running: {time.monotonic() - killed:.1f} s")
    boots.append(await logged_in(other.host))

    # its storage daemon is killed: back under the running machine, which goes on writing
    host.host.exec(["pkill", "-9", "-f", "qemu-storage-daemon.*" + VOLUME])
    can_connect(other.host, ssh("echo more > more; sync; cat more"), seconds=60)
    assert (await host.vm(VM)).detail["pid"] == observed.detail["pid"]
    assert await until(lambda: is_calm(host), seconds=30)
    boots[-1] = await logged_in(other.host)  # another one where requests were in flight: then it was reset

    # the agent dies: the machine is left alone and found again
    in_host(host.host, int(host.host.exec(["pgrep", "-of", "agent.pyz serve"]).stdout), signal.SIGKILL)
    await host.ready()
    assert (await host.vm(VM)).detail["pid"] == observed.detail["pid"]
    assert await logged_in(other.host) == boots[-1]

    # the host reboots: everything comes back from its documents
    await asyncio.to_thread(host.host.reboot)
    await host.ready()
    await host.until_vm(VM, "running", seconds=60)
    boots.append(await logged_in(other.host))
    assert other.host.exec(ssh("cat kept more")).stdout.decode().split() == ["kept", "more"]

    # an orderly stop, a start, a restart
    stopped = dataclasses.replace(wanted, generation=generation(2), power="stopped")
    began = time.monotonic()
    await host.ensure("vm", stopped, seconds=90)
    print(f"stop: {time.monotonic() - began:.1f} s")
    assert (await host.vm(VM)).state != "running"
    await host.ensure("vm", dataclasses.replace(wanted, generation=generation(3)))
    boots.append(await logged_in(other.host))
    pid = (await host.vm(VM)).detail["pid"]
    await host.ensure("vm", dataclasses.replace(wanted, generation=generation(4), restart_generation=1), seconds=90)
    await host.until_vm(VM, "running", seconds=10, not_pid=pid)
    assert len(set(boots)) == len(boots)

    await host.purge("vm", VM, generation(5))
    await host.purge("volume", VOLUME, generation(2))
    assert host.leftovers() == before


async def is_calm(host: AgentHost) -> bool:
    return not (await host.vm(VM)).detail["reset_due"]


def in_host(host: LabHost, pid: int, number: signal.Signals) -> None:
    """Signals a process by its pid inside the host."""
    host.exec(["kill", f"-{int(number)}", str(pid)])
