"""A real container on a lab host through the agent alone: it serves, it is confined, it comes back, it is gone."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import io
import shutil
import signal
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from hostagent.protocol.wanted import (
    FileWanted,
    Generation,
    ImageWanted,
    MountWanted,
    NetworkWanted,
    NicWanted,
    RouteWanted,
    SeedWanted,
    VmWanted,
    WorkloadWanted,
)
from tests.system.agenthost import AgentHost, can_connect

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180), pytest.mark.caps("root", "netns", "sshd", "runc", "busybox")]

VM, ENGINE, WEIGHTS = "vm_01hf7yat00000000000000c1", "img_01hf7yat00000000000000c1", "img_01hf7yat00000000000000c2"
IPV4, IPV6, PORT = "10.92.0.5", "fd00:92::5", 8000
SECRET = "planted-secret-8c1f"
ONE = Generation(epoch=1, number=1)
SCRIPT = f"""
echo $TOKEN > /tmp/token
(
  id
  grep -E 'CapEff|NoNewPrivs|Seccomp:' /proc/self/status
  cat /weights/model
  unshare -U true
  ip addr add 10.0.0.1 dev eth0
  echo try > /weights/x
) > /tmp/report 2>&1
exec httpd -f -p {PORT} -h /tmp
"""
FETCH = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=3).read().decode(), end='')"
NIC = NicWanted(id="nic_01hf7yat00000000000000c1", generation=ONE, mac="06:00:00:00:92:05", ipv4=IPV4, ipv6=IPV6)


def root_archive() -> bytes:
    """busybox, a directory tree, and what an archive must not bring: a device and a set-uid program."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:

        def add(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", mode: int = 0o755, link: str = "") -> None:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode, entry.size, entry.linkname = kind, mode, len(data), link
            entry.devmajor, entry.devminor = 1, 1
            archive.addfile(entry, io.BytesIO(data))

        for directory in ("bin", "dev", "etc", "proc", "sys", "tmp", "run", "var", "weights"):
            add(directory, tarfile.DIRTYPE)
        add("bin/busybox", data=Path(shutil.which("busybox") or "").read_bytes(), mode=0o4755)
        for applet in ("sh", "httpd", "cat", "id", "ip", "grep", "mkdir", "unshare", "true"):
            add(f"bin/{applet}", tarfile.LNKTYPE, link="bin/busybox")
        add("etc/mem", tarfile.CHRTYPE, mode=0o666)
    return content.getvalue()


def image_wanted(image_id: str, purpose: str, name: str, content: bytes) -> ImageWanted:
    file = FileWanted(name=name, sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))
    return ImageWanted(id=image_id, generation=ONE, purpose=purpose, files=(file,))


VM_WANTED = VmWanted(
    id=VM,
    generation=ONE,
    driver="container",
    vcpus=1,
    memory_bytes=128 << 20,
    image_id=ENGINE,
    boot=None,
    disks=(),
    nics=(NIC,),
    seed=SeedWanted(hostname="engine", nameservers=("192.0.2.53",)),
    on_guest_poweroff="restart",
    workload=WorkloadWanted(
        argv=("/bin/sh", "-c", SCRIPT),
        secret_env={"TOKEN": SECRET},
        mounts=(MountWanted(image_id=WEIGHTS, path="/weights"),),
        port=PORT,
    ),
)


@pytest.fixture
async def hosts(lab, tmp_path) -> tuple[AgentHost, AgentHost]:
    """Host a with both images, and host b with routes to the container."""
    made = (AgentHost(lab.host("a")), AgentHost(lab.host("b")))
    for host in made:
        host.install()
        await host.ready()
    files = {"root.tar": root_archive(), "model": b"weights\n"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    await made[0].put_image(image_wanted(ENGINE, "engine", "root.tar", files["root.tar"]), tmp_path)
    await made[0].put_image(image_wanted(WEIGHTS, "weights", "model", files["model"]), tmp_path)
    record = lab.host("a").record
    routes = (
        RouteWanted(destination_cidr=f"{IPV4}/32", via=record.address),
        RouteWanted(destination_cidr=f"{IPV6}/128", via=record.address_ipv6),
    )
    await made[1].ensure("network", NetworkWanted(id="routes", generation=ONE, routes=routes))
    return made


async def fetch(host: AgentHost, name: str, address: str = IPV4, *, seconds: float = 20) -> str:
    argv = ["python3", "-c", FETCH, f"http://{address}:{PORT}/{name}"]
    return (await asyncio.to_thread(can_connect, host.host, argv, seconds=seconds)).stdout.decode()


async def test_a_container_lives_its_whole_life(hosts):
    host, other = hosts
    before = host.leftovers()

    started = time.monotonic()
    await host.ensure("vm", VM_WANTED)
    assert await fetch(other, "token") == f"{SECRET}\n"
    print(f"ensure_to_answer: {time.monotonic() - started:.1f} s")
    assert await fetch(other, "token", f"[{IPV6}]") == f"{SECRET}\n"
    check_confinement((await fetch(other, "report")).splitlines(), host)
    check_secret(host)

    # runc killed from outside leaves its container behind; the agent clears it away and starts anew
    pid = (await host.vm(VM)).detail["pid"]
    host.host.exec(["kill", f"-{int(signal.SIGKILL)}", str(pid)])
    await host.until_vm(VM, "running", seconds=20, not_pid=pid)
    assert await fetch(other, "token") == f"{SECRET}\n"
    processes = host.host.exec(["ps", "-eo", "args"]).stdout.decode()
    assert processes.count("httpd -f") == 1

    await asyncio.to_thread(host.host.reboot)
    await host.ready()
    assert await fetch(other, "token", seconds=40) == f"{SECRET}\n"

    await host.ensure("vm", dataclasses.replace(VM_WANTED, generation=Generation(epoch=1, number=2), power="stopped"))
    assert "httpd" not in host.host.exec(["ps", "-eo", "args"]).stdout.decode()
    await host.ensure("vm", dataclasses.replace(VM_WANTED, generation=Generation(epoch=1, number=3)))
    assert await fetch(other, "token") == f"{SECRET}\n"

    await host.purge("vm", VM, Generation(epoch=1, number=4))
    assert host.leftovers() == before


def check_confinement(report: list[str], host: AgentHost) -> None:
    text = "\n".join(report)
    assert "uid=1000 gid=1000" in text
    assert "CapEff:\t0000000000000000" in text
    assert "NoNewPrivs:\t1" in text
    assert "Seccomp:\t2" in text
    assert "weights" in report
    assert "unshare" in text  # refused
    assert "RTNETLINK answers: Operation not permitted" in text
    assert "Read-only file system" in text or "Permission denied" in text
    trees = list((host.host.disk / f"var/lib/bedplate/vm/{VM}").glob("tree-*"))
    assert len(trees) == 1
    assert not (trees[0] / "etc/mem").exists()
    assert (trees[0] / "bin/busybox").stat().st_uid >= 65_536
    assert not (trees[0] / "bin/busybox").stat().st_mode & 0o4000


def check_secret(host: AgentHost) -> None:
    """Not in any command line, nor on the disk in plain."""
    assert SECRET not in host.host.exec(["ps", "-eo", "args"]).stdout.decode()
    found = subprocess.run(["grep", "-rlF", SECRET, str(host.host.disk)], check=False, capture_output=True, timeout=30)
    assert found.stdout == b""
