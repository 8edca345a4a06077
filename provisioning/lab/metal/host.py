"""One emulated server: its disk, its link to this machine, its process; reached by SSH as any server is.

The one rule: everything it makes is inside its directory, or is the one link that its record names before it is made and the
one process whose number lies in the directory; `clean` removes all of it, whoever made it and however the maker ended.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from hostagent.drivers.machine.kvm import tsc_khz
from provisioning.lab import network
from provisioning.lab.metal.disk import HOST_KEY, prepare_disk
from provisioning.lab.metal.image import DISK_FILE, KERNEL_FILE, build
from provisioning.lab.metal.machine import MetalFiles, MetalSpec, metal_argv
from provisioning.lab.model import LabError
from provisioning.lab.processes import end_everything, start_ticks

RECORD = "metal.json"
BOOT_SECONDS = 180.0
BOOT_ID = "/proc/sys/kernel/random/boot_id"
ACCELERATOR_BYTES = 64 << 20


@dataclass(slots=True, kw_only=True)
class MetalRecord:
    id: str
    name: str
    cores: int
    memory_bytes: int
    devices: list[str]
    ipv4: str = ""
    ipv6: str = ""

    @property
    def link(self) -> str:
        return f"bm{self.id}"


class MetalHost:
    """`with MetalHost(spec, directory) as host` boots it and leaves nothing behind. `directory` is this host's alone.

    A server found in the directory is taken over as it is. It has the face of a lab host made of namespaces.
    """

    def __init__(self, directory: Path, spec: MetalSpec | None = None, *, image: Path | None = None) -> None:
        self.directory = directory.absolute()
        self._image = image
        record = _read(self.directory)
        if record is None:
            if spec is None:
                raise LabError(f"there is no server in {directory}")
            self.directory.mkdir(parents=True, exist_ok=True)
            record = MetalRecord(
                id=secrets.token_hex(4),
                name=spec.name,
                cores=spec.cores,
                memory_bytes=spec.memory_bytes,
                devices=list(spec.devices),
            )
            _write(self.directory, record)
        self.record = record

    def __enter__(self) -> Self:
        try:
            self.up()
        except BaseException:
            self.clean()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.clean()

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def address(self) -> str:
        """Where SSH is reached from this machine, and by which other hosts would route to it."""
        return f"{self.record.ipv4.rpartition('.')[0]}.11"

    @property
    def port(self) -> int:
        return 22

    @property
    def machine_address(self) -> str:
        """Ours on the link."""
        return f"{self.record.ipv4.rpartition('.')[0]}.1"

    @property
    def identity(self) -> Path:
        """Private key that may log in as root."""
        return self.directory / "ssh/id_ed25519"

    @property
    def host_key(self) -> str:
        """Public half of the sshd's key, `ssh-ed25519 AAAA…`."""
        return (self.directory / f"ssh/{HOST_KEY}.pub").read_text().rsplit(" ", 1)[0]

    @property
    def files(self) -> MetalFiles:
        return MetalFiles(directory=self.directory)

    @property
    def is_running(self) -> bool:
        return self.pid > 0

    @property
    def pid(self) -> int:
        """Of the process that emulates it, by the file it writes itself; 0 when there is none."""
        try:
            pid = int(self.files.pid.read_text())
            argv = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return 0
        return pid if str(self.files.disk).encode() in argv else 0

    def up(self) -> None:
        """Makes what is missing, starts it when it does not run, returns when its sshd answers; twice is once."""
        if not (self.is_running and self.files.disk.exists()):
            self._image = self._image or build()
        if not self.record.ipv4:
            with network.address_lock():
                self.record.ipv4, self.record.ipv6 = network.choose_networks()
                self._save()
                self._make_link()
        if self._image is not None and not self.files.disk.exists():
            prepare_disk(self.directory, self._image / DISK_FILE, self.files.disk, self.record.name, self._network_text())
        if not self.is_running:
            self.start()

    def start(self) -> None:
        """Raises LabError when no sshd answers in time."""
        self._image = self._image or build()
        with self.files.accelerator_disk.open("wb") as stream:
            stream.truncate(ACCELERATOR_BYTES)
        record = self.record
        spec = MetalSpec(name=record.name, cores=record.cores, memory_bytes=record.memory_bytes, devices=tuple(record.devices))
        octets = bytes.fromhex(record.id)
        mac = ":".join(f"{octet:02x}" for octet in (0x02, *octets, 11))
        argv = metal_argv(spec, self.files, kernel=self._image / KERNEL_FILE, link=record.link, mac=mac, tsc_khz=tsc_khz())
        network.run(argv)
        self.await_sshd()

    def await_sshd(self, seconds: float = BOOT_SECONDS) -> None:
        """Raises LabError with the last words of console and QEMU."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.is_running:
            try:
                with socket.create_connection((self.address, self.port), timeout=5) as connection:
                    if connection.recv(4) == b"SSH-":
                        return
            except OSError:
                time.sleep(0.2)
        said = "".join(_tail(path) for path in (self.files.log, self.files.console))
        raise LabError(f"{self.name}: no sshd after {seconds:.0f} s: {said}")

    def exec(
        self, argv: list[str], *, timeout: float = 90, check: bool = True, stdin: bytes | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs a command there as root, over one kept SSH connection; raises LabError when it fails and `check` is on."""
        done = subprocess.run(self.ssh_argv(argv), check=False, capture_output=True, timeout=timeout, input=stdin or b"")
        if check and done.returncode != 0:
            raise LabError(f"{self.name}: {shlex.join(argv)}: exit {done.returncode}: {done.stderr.decode(errors='replace')}")
        return done

    def ssh_argv(self, argv: list[str]) -> list[str]:
        directory = self.directory / "ssh"
        options = [f"UserKnownHostsFile={directory / 'known_hosts'}", "StrictHostKeyChecking=yes", "BatchMode=yes"]
        options += ["ConnectTimeout=30", "IdentitiesOnly=yes", "ServerAliveInterval=5", "ServerAliveCountMax=6"]
        options += ["ControlMaster=auto", f"ControlPath={directory / 'control'}", "ControlPersist=60", "LogLevel=ERROR"]
        flags = [word for option in options for word in ("-o", option)]
        return ["ssh", "-F", "none", "-i", str(self.identity), *flags, f"root@{self.address}", "--", shlex.join(argv)]

    def authorize(self, public_key: str) -> None:
        """Lets the key log in as root, as an operator would before enrolment."""
        self.exec(["sh", "-c", "cat >> /root/.ssh/authorized_keys"], stdin=public_key.strip().encode() + b"\n")

    def boot_id(self) -> str:
        return self.exec(["cat", BOOT_ID]).stdout.decode().strip()

    def await_boot(self, before: str, seconds: float = BOOT_SECONDS) -> str:
        """The id of another boot than `before`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.hang_up()
            self.await_sshd(end - time.monotonic())
            try:
                found = self.boot_id()
            except (LabError, subprocess.TimeoutExpired):
                continue
            if found != before:
                return found
            time.sleep(0.5)
        raise LabError(f"{self.name}: no other boot after {seconds:.0f} s: {_tail(self.files.console)}")

    def hang_up(self) -> None:
        """Ends the kept SSH connection."""
        if (self.directory / "ssh/control").exists():
            argv = self.ssh_argv([])
            subprocess.run([*argv[:-3], "-O", "exit", argv[-3]], check=False, capture_output=True, timeout=20)

    def stop(self) -> None:
        """Cuts the power."""
        self.hang_up()
        if pid := self.pid:
            end_everything(pid, start_ticks(pid) or 0)

    def clean(self) -> None:
        """Removes process, link and directory. Works on what another process made, and twice."""
        if not self.directory.exists():
            return
        self.stop()
        network.run(["ip", "link", "delete", self.record.link], check=False)
        shutil.rmtree(self.directory)

    def _make_link(self) -> None:
        link = self.record.link
        network.run(["ip", "tuntap", "add", "dev", link, "mode", "tap"])
        network.run(["sysctl", "-qw", f"net.ipv6.conf.{link}.accept_ra=0"])
        network.run(["ip", "address", "add", f"{self.machine_address}/24", "dev", link])
        network.run(["ip", "address", "add", f"{self.record.ipv6.replace('/64', '1/64')}", "dev", link, "nodad"])
        network.run(["ip", "link", "set", link, "up"])

    def _network_text(self) -> str:
        prefix = self.record.ipv6.removesuffix("/64")
        return (
            f"[Match]\nName=eth0\n\n[Network]\nAddress={self.address}/24\nAddress={prefix}11/64\n"
            "IPv6AcceptRA=no\nLinkLocalAddressing=ipv6\n"
        )

    def _save(self) -> None:
        _write(self.directory, self.record)


def _read(directory: Path) -> MetalRecord | None:
    try:
        return MetalRecord(**json.loads((directory / RECORD).read_text()))
    except FileNotFoundError:
        return None


def _write(directory: Path, record: MetalRecord) -> None:
    temporary = directory / f"{RECORD}.new"
    with temporary.open("w") as stream:
        json.dump(asdict(record), stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(directory / RECORD)


def _tail(path: Path, count: int = 1500) -> str:
    return path.read_text(errors="replace")[-count:] if path.exists() else ""
