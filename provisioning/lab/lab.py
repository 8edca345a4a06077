"""A lab: hosts on one machine, each with namespaces, a pid 1, an sshd and a disk of its own.

The one rule: everything a lab makes is inside its directory, its cgroup or its network, and `clean` removes all three,
whoever made them and however the maker ended.
"""

from __future__ import annotations

import json
import secrets
import select
import shutil
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import IO, Self

from provisioning.lab import network
from provisioning.lab.cgroups import Hierarchy, hierarchies, make_cgroups, remove_cgroups
from provisioning.lab.disk import SSHD_LOG, prepare_disk
from provisioning.lab.model import (
    FIRST_HOST_NUMBER,
    HostRecord,
    HostSpec,
    LabError,
    LabRecord,
    read_record,
    write_record,
)
from provisioning.lab.processes import end_everything, is_running, start_ticks

BOOT_SECONDS = 30
GATEWAY_SSH_PORT = 22022
STAGE = Path(__file__).with_name("stage.py")


class LabHost:
    """One host of a lab. What it has on disk survives `reboot`; processes, /run, /tmp and its network do not."""

    def __init__(self, lab: Lab, record: HostRecord) -> None:
        self.lab = lab
        self.record = record

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def address(self) -> str:
        """Where SSH is reached from the machine's own namespace."""
        return self.record.ssh_address

    @property
    def port(self) -> int:
        return self.record.ssh_port

    @property
    def data_address(self) -> str:
        """IPv4 address on the lab's network, by which other hosts route to it."""
        return self.record.address

    @property
    def pid(self) -> int:
        return self.record.pid

    @property
    def disk(self) -> Path:
        return self.lab.directory / "hosts" / self.name

    @property
    def root(self) -> Path:
        """The host's tree as seen from the machine, while it runs."""
        return Path(f"/proc/{self.record.pid}/root")

    @property
    def is_running(self) -> bool:
        return is_running(self.record.pid, self.record.start_ticks)

    @property
    def host_key(self) -> str:
        """Public half of the sshd's key, `ssh-ed25519 AAAA…`."""
        return (self.disk / "etc/upper/ssh/ssh_host_ed25519_key.pub").read_text().rsplit(" ", 1)[0]

    def authorize(self, public_key: str) -> None:
        """Lets the key log in as root, as an operator would before enrolment."""
        path = self.disk / "root/.ssh/authorized_keys"
        with path.open("a") as stream:
            stream.write(public_key.strip() + "\n")

    def exec(
        self, argv: list[str], *, timeout: float = 30, check: bool = True, stdin: bytes | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs a command inside the host as root, without SSH; raises LabError when it fails and `check` is on."""
        done = subprocess.run(self.exec_argv(argv), check=False, capture_output=True, timeout=timeout, input=stdin)
        if check and done.returncode != 0:
            raise LabError(f"{self.name}: {' '.join(argv)}: exit {done.returncode}: {done.stderr.decode(errors='replace')}")
        return done

    def exec_argv(self, argv: list[str]) -> list[str]:
        if not self.is_running:
            raise LabError(f"{self.name} is not running")
        return ["nsenter", "--target", str(self.record.pid), "--all", "--root", "--", *argv]

    def ssh_argv(self, argv: list[str], *, user: str = "root") -> list[str]:
        """`ssh` from the machine with the lab's own key; the host key is checked."""
        directory = self.lab.directory / "ssh"
        options = [f"UserKnownHostsFile={directory / 'known_hosts'}", "StrictHostKeyChecking=yes", "BatchMode=yes"]
        options += ["ConnectTimeout=10", "IdentitiesOnly=yes"]
        flags = [word for option in options for word in ("-o", option)]
        place = ["-p", str(self.port), f"{user}@{self.address}"]
        return ["ssh", "-F", "none", "-i", str(directory / "id_ed25519"), *flags, *place, "--", *argv]

    def ssh(self, argv: list[str], *, timeout: float = 30, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run(self.ssh_argv(argv), check=False, capture_output=True, timeout=timeout, stdin=subprocess.DEVNULL)
        if check and done.returncode != 0:
            raise LabError(f"{self.name}: ssh {' '.join(argv)}: exit {done.returncode}: {done.stderr.decode(errors='replace')}")
        return done

    def start(self) -> None:
        self.lab.start_host(self)

    def stop(self) -> None:
        """As a power cut: pid 1 is killed, and with it everything in the host."""
        self.lab.stop_host(self)

    def reboot(self) -> None:
        self.stop()
        self.start()


class Lab:
    """`Lab(name, directory, hosts)`; `with Lab(…) as lab` starts it and leaves nothing behind.

    `directory` is the lab's alone. A lab found there is taken over with the hosts it has.
    """

    def __init__(self, name: str, directory: Path, hosts: tuple[HostSpec, ...] = ()) -> None:
        self.directory = directory.absolute()
        self.directory.mkdir(parents=True, exist_ok=True)
        record = read_record(self.directory)
        if record is None:
            record = LabRecord(id=secrets.token_hex(4), name=name, ipv4="", ipv6="")
            record.cgroups = [str(entry.mount / f"bedplate-lab-{record.id}") for entry in hierarchies()]
            write_record(self.directory, record)
        self.record = record
        self.specs = hosts

    @classmethod
    def found(cls, directory: Path) -> Lab:
        """The lab whose record lies in `directory`; raises LabError when there is none."""
        record = read_record(directory)
        if record is None:
            raise LabError(f"there is no lab in {directory}")
        return cls(record.name, directory)

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
    def hosts(self) -> tuple[LabHost, ...]:
        return tuple(LabHost(self, record) for record in self.record.hosts)

    def host(self, name: str) -> LabHost:
        return LabHost(self, self.record.host(name))

    @property
    def machine_address(self) -> str:
        """The machine's own address on the lab's network."""
        return str(self.record.network_ipv4[1])

    def up(self) -> None:
        """Makes what is missing and starts what is not running; twice is once."""
        if not self.record.ipv4:
            with network.address_lock():
                self.record.ipv4, self.record.ipv6 = network.choose_networks()
                self.save()
                network.make_router(self.directory, self.record)
        self._make_identity()
        for spec in self.specs:
            if not any(host.name == spec.name for host in self.record.hosts):
                self.add_host(spec)
        for host in self.hosts:
            if not host.is_running:
                self.start_host(host)

    def add_host(self, spec: HostSpec) -> LabHost:
        """Makes the host's disk; `start` boots it."""
        number = FIRST_HOST_NUMBER + len(self.record.hosts)
        is_gateway = spec.kind == "gateway"
        address = str(self.record.network_ipv4[1 if is_gateway else number])
        record = HostRecord(
            name=spec.name,
            kind=spec.kind,
            number=number,
            cores=spec.cores,
            memory_bytes=spec.memory_bytes,
            address=address,
            address_ipv6=str(self.record.network_ipv6[1 if is_gateway else number]),
            ssh_address=self._loopback(number) if is_gateway else address,
            ssh_port=GATEWAY_SSH_PORT if is_gateway else 22,
        )
        self.record.hosts.append(record)
        if is_gateway:
            network.remember_sysctls(self.record)
        self.save()
        host = LabHost(self, record)
        prepare_disk(host.disk, record, data_interface=self.record.link if is_gateway else network.HOST_LINK)
        host.authorize((self.directory / "ssh/id_ed25519.pub").read_text())
        with (self.directory / "ssh/known_hosts").open("a") as stream:
            place = record.ssh_address if record.ssh_port == 22 else f"[{record.ssh_address}]:{record.ssh_port}"
            stream.write(f"{place} {host.host_key}\n")
        return host

    def _loopback(self, number: int) -> str:
        """A loopback address of the lab's own, from its id."""
        value = int(self.record.id[:4], 16)
        return f"127.{64 + value % 64}.{value // 64 % 256}.{number}"

    def start_host(self, host: LabHost) -> None:
        """Boots and returns when its sshd answers; raises LabError with the last lines of its log."""
        record = host.record
        record.boots += 1
        found = hierarchies()
        make_cgroups(self.record.id, record.name, found)
        config = self._write_boot_config(host, found)
        process, pid = self._launch(host, config)
        connection_in, connection_out = process
        record.pid, record.start_ticks = pid, start_ticks(pid) or 0
        self.save()
        with connection_in, connection_out:
            if record.kind == "host":
                network.connect_host(self.directory, self.record, record, pid)
            connection_in.write(b"go\n")
            connection_in.flush()
            if _line(connection_out, BOOT_SECONDS) != "ready":
                raise LabError(f"{host.name} did not boot: {self._boot_log(host)}")
        self._await_sshd(host)

    def _write_boot_config(self, host: LabHost, found: list[Hierarchy]) -> Path:
        root = host.disk / "root.mount"
        root.mkdir(exist_ok=True)
        config = {
            "root": str(root),
            "disk": str(host.disk),
            "hostname": host.name,
            "name_in_network": network.GATEWAY_NAME if host.record.kind == "gateway" else "",
            "boot_id": str(uuid.uuid4()),
            "network": network.host_commands(self.record, host.record),
            "cgroups": [entry.config(self.record.id, host.name) for entry in found],
            "init": ["/usr/bin/python3", "-I", "-S", "/etc/lab/init.py"],
        }
        path = host.disk / "boot.json"
        path.write_text(json.dumps(config))
        return path

    def _launch(self, host: LabHost, config: Path) -> tuple[tuple[IO[bytes], IO[bytes]], int]:
        """Starts the stage in new namespaces, detached from us, and learns its pid."""
        flags = ["--fork", "--pid", "--mount", "--uts", "--ipc"] + (["--net"] if host.record.kind == "host" else [])
        python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
        argv = ["setsid", "--fork", "unshare", *flags, "--", python, "-I", "-S", str(STAGE), str(config)]
        with (host.disk / "boot.log").open("wb") as log:
            process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        assert process.stdin is not None
        assert process.stdout is not None
        process.wait(timeout=BOOT_SECONDS)
        line = _line(process.stdout, BOOT_SECONDS)
        if not line.isdigit():
            raise LabError(f"{host.name} got no namespaces: {self._boot_log(host)}")
        return (process.stdin, process.stdout), int(line)

    def _boot_log(self, host: LabHost) -> str:
        return (host.disk / "boot.log").read_text(errors="replace")[-2000:]

    def _await_sshd(self, host: LabHost) -> None:
        end = time.monotonic() + BOOT_SECONDS
        while time.monotonic() < end:
            try:
                with socket.create_connection((host.address, host.port), timeout=2) as connection:
                    if connection.recv(4) == b"SSH-":
                        return
            except OSError:
                if not host.is_running:
                    break
            time.sleep(0.05)
        log = host.disk / SSHD_LOG.lstrip("/")
        raise LabError(
            f"{host.name}: no sshd after {BOOT_SECONDS} s: {log.read_text() if log.exists() else self._boot_log(host)}"
        )

    def stop_host(self, host: LabHost) -> None:
        record = host.record
        end_everything(record.pid, record.start_ticks)
        remove_cgroups([f"{path}/{record.name}" for path in self.record.cgroups])
        record.pid = record.start_ticks = 0
        self.save()

    def clean(self) -> None:
        """Removes hosts, network, cgroups and the directory. Works on what another process made, and twice."""
        for host in self.hosts:
            end_everything(host.record.pid, host.record.start_ticks)
        remove_cgroups(self.record.cgroups)
        network.restore_machine(self.record)
        network.remove_router(self.directory, self.record)
        shutil.rmtree(self.directory, ignore_errors=False)

    def save(self) -> None:
        write_record(self.directory, self.record)

    def _make_identity(self) -> None:
        directory = self.directory / "ssh"
        directory.mkdir(exist_ok=True, mode=0o700)
        if not (directory / "id_ed25519").exists():
            network.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(directory / "id_ed25519")])

    @property
    def identity(self) -> Path:
        """Private key that may log in as root on every host."""
        return self.directory / "ssh/id_ed25519"


def _line(stream: IO[bytes], deadline_seconds: float) -> str:
    readable, _, _ = select.select([stream], [], [], deadline_seconds)
    return stream.readline().decode().strip() if readable else ""


__all__ = ["Lab", "LabError", "LabHost"]
