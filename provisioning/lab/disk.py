"""What lies on a fresh lab host's disk: base users and packages come from the machine, the rest is its own."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from pathlib import Path

from provisioning.lab.model import HostRecord
from provisioning.lab.network import run

SUPERVISOR = Path(__file__).parents[2] / "hostagent"
INIT_MAIN = """\
import sys

sys.path.insert(0, "/etc/lab")

from hostagent.drivers.supervisor.init import main

sys.exit(main(["--run", "/run/init", "--units", "/etc/lab/units.d", "--units", "/etc/bedplate/units.d"]))
"""
SSHD_LOG = "/var/log/sshd.log"
OPAQUE = ("ssh", "bedplate", "lab")

SSHD_CONFIG = """\
Port {port}
ListenAddress {address}
{more}HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
Subsystem sftp internal-sftp
"""

HOST_TOML = """\
# What this host may give away, declared rather than measured: it shares its machine with others.
cpus = {cores}
memory_bytes = {memory_bytes}
data_interface = "{data_interface}"
public_interface = "{data_interface}"
"""


def prepare_disk(disk: Path, record: HostRecord, *, data_interface: str) -> None:
    """Writes identity, sshd and init below `disk`; directories of the machine's that must not show through are opaque."""
    etc = disk / "etc/upper"
    for name in OPAQUE:
        (etc / name).mkdir(parents=True)
        os.setxattr(etc / name, "trusted.overlay.opaque", b"y")
    (etc / "machine-id").write_text(uuid.uuid4().hex + "\n")
    (etc / "hostname").write_text(record.name + "\n")
    (etc / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{record.address} {record.name}\n")
    (etc / "bedplate/host.toml").write_text(
        HOST_TOML.format(cores=record.cores, memory_bytes=record.memory_bytes, data_interface=data_interface)
    )
    _prepare_ssh(etc / "ssh", record)
    units = etc / "lab/units.d"
    units.mkdir()
    sshd = {"name": "sshd", "argv": ["/usr/sbin/sshd", "-D", "-e"], "restart": "always", "log_path": SSHD_LOG}
    (units / "sshd.json").write_text(json.dumps(sshd))
    _install_init(etc / "lab")
    root = disk / "root"
    (root / ".ssh").mkdir(parents=True)
    (root / ".ssh").chmod(0o700)
    root.chmod(0o700)


def _install_init(directory: Path) -> None:
    """Pid 1: the product's plain supervisor, from a copy of its source, so that the host has it before it is enrolled.

    Its run directory is not the product's: what enrolment installs (a supervisor of its own, the agent) are units of it.
    """
    shutil.copytree(SUPERVISOR, directory / "hostagent", ignore=shutil.ignore_patterns("__pycache__"))
    (directory / "init.py").write_text(INIT_MAIN)


def _prepare_ssh(directory: Path, record: HostRecord) -> None:
    more = "" if record.kind == "gateway" else f"ListenAddress {record.address_ipv6}\n"
    config = SSHD_CONFIG.format(port=record.ssh_port, address=record.ssh_address, more=more)
    (directory / "sshd_config").write_text(config)
    key = directory / "ssh_host_ed25519_key"
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", record.name, "-f", str(key)])
