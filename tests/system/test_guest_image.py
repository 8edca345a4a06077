"""The guest image boots from vhost-user-blk with the seed that the agent writes, and does what the seed says."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hostagent.drivers.machine.seed import render_seed, seed_image
from hostagent.protocol.wanted import Generation, NicWanted, SeedWanted
from provisioning.images.build import build, default_cache
from provisioning.images.manifest import Manifest, read_manifest
from provisioning.lab import Lab

pytestmark = [
    pytest.mark.lab,
    pytest.mark.caps("root", "netns", "sshd", "qemu", "qsd", "debootstrap"),
    pytest.mark.timeout(900),
]
BOOT_SECONDS = 120
MAC, IPV4, IPV6 = "02:00:00:0a:00:01", "10.90.0.5", "fd00:90::5"


@pytest.fixture(scope="session")
def image() -> Path:
    return build()


@dataclass
class Guest:
    """A guest on lab host a, started as the agent would: qemu-storage-daemon, a tap, /32 and /128 routes."""

    lab: Lab
    image: Path
    manifest: Manifest
    directory: Path
    disk_bytes: int
    processes: list[subprocess.Popen[bytes]]

    def on_host(self, argv: list[str]) -> list[str]:
        """In the host's network, with the machine's files (and its temporary directory) in sight."""
        return ["nsenter", "--target", str(self.lab.host("a").pid), "--net", "--", *argv]

    def run(self, argv: list[str]) -> str:
        return subprocess.run(self.on_host(argv), check=True, capture_output=True, text=True, timeout=30).stdout

    def write_seed(self, seed: SeedWanted, instance: str) -> None:
        nic = NicWanted(id="nic_1", generation=Generation(epoch=1, number=1), mac=MAC, ipv4=IPV4, ipv6=IPV6, mtu_bytes=1400)
        (self.directory / "seed.img").write_bytes(seed_image(render_seed(instance, seed, (nic,))))

    def connect(self) -> None:
        ip = ["ip", "tuntap", "add", "tap1", "mode", "tap"]
        self.run(ip)
        for argv in (
            ["link", "set", "tap1", "address", "02:00:00:00:00:01", "mtu", "1400", "up"],
            ["address", "add", "169.254.1.1/32", "dev", "tap1"],
            ["address", "add", "fe80::1/64", "dev", "tap1", "nodad"],
            ["route", "add", f"{IPV4}/32", "dev", "tap1"],
            ["route", "add", f"{IPV6}/128", "dev", "tap1"],
            ["neighbour", "add", IPV4, "lladdr", MAC, "dev", "tap1"],
            ["neighbour", "add", IPV6, "lladdr", MAC, "dev", "tap1"],
        ):
            self.run(["ip", *argv])

    def start(self) -> None:
        root = self.directory / "root.qcow2"
        if not root.exists():
            base = ["-F", "qcow2", "-b", str(self.image / self.manifest.root_file)]
            subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *base, str(root), str(self.disk_bytes)], check=True)
        vhost = self.directory / "root.sock"
        vhost.unlink(missing_ok=True)
        argv = ["qemu-storage-daemon", "--blockdev", f"driver=file,node-name=f,filename={root}"]
        argv += ["--blockdev", "driver=qcow2,node-name=d,file=f"]
        argv += ["--export", f"type=vhost-user-blk,id=e,node-name=d,writable=on,addr.type=unix,addr.path={vhost}"]
        self.spawn(argv)
        wait_for(vhost.exists, 20)
        boot = self.manifest.boot
        argv = ["qemu-system-x86_64", "-M", "q35", "-cpu", "max", "-accel", "tcg", "-smp", "1", "-m", "384", "-nodefaults"]
        argv += ["-object", "memory-backend-memfd,id=mem,size=384M,share=on", "-numa", "node,memdev=mem"]
        argv += ["-kernel", str(self.image / boot.kernel_file), "-initrd", str(self.image / boot.initramfs_file)]
        argv += ["-append", f"{boot.cmdline} tsc_early_khz={tsc_khz()}", "-display", "none", "-no-reboot"]
        argv += ["-serial", f"file:{self.directory / 'console.log'}", "-chardev", f"socket,id=c,path={vhost}"]
        argv += ["-device", "vhost-user-blk-pci,chardev=c,config-wce=off"]  # else the guest believes in a write-through disk
        argv += ["-drive", f"file={self.directory / 'seed.img'},format=raw,if=none,id=s,readonly=on"]
        argv += ["-device", "virtio-blk-pci,drive=s", "-netdev", "tap,id=n,ifname=tap1,script=no,downscript=no"]
        argv += ["-device", f"virtio-net-pci,netdev=n,mac={MAC}", "-device", "virtio-rng-pci"]
        argv += ["-monitor", f"unix:{self.directory / 'monitor.sock'},server,nowait"]
        self.spawn(argv)

    def spawn(self, argv: list[str]) -> None:
        with (self.directory / "stderr").open("ab") as log:
            self.processes.append(subprocess.Popen(self.on_host(argv), stderr=log))

    @property
    def console(self) -> str:
        return (self.directory / "console.log").read_text(errors="replace")

    def ssh(self, command: str, *, check: bool = True) -> str:
        options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "ConnectTimeout=5"]
        argv = ["ssh", "-F", "none", "-q", "-i", str(self.lab.identity), *options, f"debian@{IPV4}", command]
        done = subprocess.run(self.on_host(argv), check=False, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, done.stdout + done.stderr + self.console[-3000:]
        return done.stdout

    def wait_for_ssh(self) -> None:
        def is_up() -> bool:
            assert self.processes[-1].poll() is None, self.console[-3000:]
            return self.ssh("echo up", check=False) == "up\n"

        wait_for(is_up, BOOT_SECONDS, lambda: self.console[-3000:])

    def press_power_button(self) -> None:
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.settimeout(10)
            monitor.connect(str(self.directory / "monitor.sock"))
            monitor.sendall(b"system_powerdown\n")
            answer = b""
            while answer.count(b"(qemu)") < 2:  # closed any earlier, the command is lost
                answer += monitor.recv(4096)

    def stop(self) -> None:
        for process in reversed(self.processes):
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(timeout=20)
        self.processes.clear()


def tsc_khz() -> int:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return int(float(next(line for line in lines if line.startswith("cpu MHz")).split(":")[1]) * 1000)


def wait_for(condition, seconds: float, explain=lambda: "") -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, explain()
        time.sleep(0.1)


@pytest.fixture
def guest(lab: Lab, image: Path) -> Iterator[Guest]:
    directory = Path(tempfile.mkdtemp(prefix=f"bedplate-guest-{os.getpid()}-"))
    made = Guest(lab, image, read_manifest(image), directory, 2 << 30, [])
    try:
        made.connect()
        yield made
    finally:
        made.stop()
        with contextlib.suppress(subprocess.CalledProcessError):
            made.run(["ip", "link", "delete", "tap1"])
        shutil.rmtree(directory)


def seed_of(lab: Lab, **more: str) -> SeedWanted:
    key = lab.identity.with_suffix(".pub").read_text().strip()
    return SeedWanted(hostname="first", user="debian", ssh_authorized_keys=(key,), nameservers=("10.90.0.1",), **more)


@pytest.mark.slow
def test_first_boot_does_what_the_seed_says(guest: Guest) -> None:
    guest.write_seed(seed_of(guest.lab), "vm_one")
    started = time.monotonic()
    guest.start()
    guest.wait_for_ssh()
    print(f"launch to ssh: {time.monotonic() - started:.1f} s\n{guest.console[-1500:]}")
    assert guest.ssh("hostname; whoami; sudo -n whoami") == "first\ndebian\nroot\n"
    assert guest.ssh("cat /etc/resolv.conf").strip() == "nameserver 10.90.0.1"
    addresses = guest.ssh("ip -o address show dev eth0")
    assert f"{IPV4}/32" in addresses
    assert f"{IPV6}/128" in addresses
    assert "default via 169.254.1.1 dev eth0 onlink" in guest.ssh("ip route")
    assert "default via fe80::1 dev eth0" in guest.ssh("ip -6 route")
    assert guest.ssh("cat /sys/block/vda/queue/write_cache") == "write back\n"
    assert "mtu 1400" in guest.ssh("ip link show eth0")
    guest.run(["ping", "-c1", "-W10", IPV6])
    wait_for(lambda: int(guest.ssh("df --output=size -B1 / | tail -1")) > 1.8 * 2**30, 30)
    host_key = guest.ssh("cat /etc/ssh/ssh_host_ed25519_key.pub").strip()
    assert host_key in guest.console.replace("\r", "")
    guest.ssh("echo kept > kept; sync; sudo poweroff", check=False)
    guest.processes[-1].wait(timeout=60)
    guest.stop()
    guest.start()
    guest.wait_for_ssh()
    assert guest.ssh("cat kept; cat /etc/ssh/ssh_host_ed25519_key.pub") == f"kept\n{host_key}\n"
    guest.press_power_button()
    guest.processes[-1].wait(timeout=60)


@pytest.mark.slow
def test_user_data_of_the_tenant_runs_once(guest: Guest) -> None:
    text = "#cloud-config\nwrite_files:\n- path: /srv/made\n  content: by user data\nruncmd:\n- [touch, /srv/ran]\nfoo: 1\n"
    guest.write_seed(seed_of(guest.lab, user_data=text), "vm_two")
    guest.start()
    guest.wait_for_ssh()
    wait_for(lambda: guest.ssh("cat /srv/made; ls /srv; cat /var/log/user-data.log", check=False).count("ran") > 0, 30)
    assert guest.ssh("cat /srv/made") == "by user data"
    assert "foo needs an image with cloud-init" in guest.ssh("sudo cat /var/log/user-data.log")


def test_the_image_is_described_by_its_manifest(image: Path) -> None:
    manifest = read_manifest(image)
    assert {file.name: (image / file.name).stat().st_size for file in manifest.files} == {
        file.name: file.size_bytes for file in manifest.files
    }
    assert (image / manifest.boot.initramfs_file).stat().st_size < 4 << 20
    assert "console=ttyS0" in manifest.boot.cmdline
    assert build() == image


CLOUD_INIT = ["cloud-init", "python3-json-pointer", "python3-jsonpatch", "python3-jsonschema", "python3-configobj"]
CLOUD_INIT += ["python3-yaml", "python3-jinja2", "python3-markupsafe", "python3-attr", "python3-pyrsistent", "python3-oauthlib"]
CLOUD_INIT += ["python3-requests", "python3-urllib3", "python3-certifi", "python3-chardet", "python3-idna", "python3-six"]


@pytest.fixture(scope="session")
def cloud_init() -> Path:
    """Debian's cloud-init, unpacked beside the images and never installed: it would take over this machine's next boot."""
    root = default_cache() / "cloud-init"
    if not (root / "usr/bin/cloud-init").exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as name:
            argv = ["apt-get", "download", *CLOUD_INIT]
            if subprocess.run(argv, cwd=name, check=False, capture_output=True, timeout=120).returncode != 0:
                pytest.skip("Debian's cloud-init cannot be downloaded")
            for package in sorted(Path(name).glob("*.deb")):
                subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True, timeout=60)
    return root


def test_the_seed_is_valid_for_cloud_init(cloud_init: Path, tmp_path: Path) -> None:
    nic = NicWanted(id="nic_1", generation=Generation(epoch=1, number=1), mac=MAC, ipv4=IPV4, ipv6=IPV6)
    seed = SeedWanted(hostname="h", ssh_authorized_keys=("ssh-ed25519 AAAA test",), nameservers=("10.90.0.1",))
    for name, text in render_seed("vm_three", seed, (nic,)).items():
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(cloud_init / "usr/lib/python3/dist-packages")}
    parse = (
        "import sys, yaml; from cloudinit.net.network_state import parse_net_config_data as parse\n"
        "state = parse(yaml.safe_load(open(sys.argv[1])))\n"
        "print(sorted(subnet['address'] for each in state.iter_interfaces() for subnet in each['subnets']))\n"
    )
    for argv, said in (
        ([str(cloud_init / "usr/bin/cloud-init"), "schema", "--config-file", str(tmp_path / "user-data")], "Valid"),
        (["-c", parse, str(tmp_path / "network-config")], IPV6),
    ):
        done = subprocess.run(
            ["/usr/bin/python3", *argv], check=False, capture_output=True, text=True, timeout=60, env=environment
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert said in done.stdout
