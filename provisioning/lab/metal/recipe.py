"""What a fresh server of the metal lab has on its disk, as data; its digest is the disk's name in the cache.

The one rule: nothing of Bedplate and nothing of the lab is on it. It is a Debian server as a provider hands it over, without
what would make it slow to emulate.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from provisioning.artifacts import packages

FORMAT = 2
BASE = (
    "ca-certificates",
    "dbus",
    "init",
    "iproute2",
    "iputils-ping",
    "kmod",
    "netbase",
    "openssh-server",
    "procps",
    "python3",
    "sudo",
    "systemd",
    "systemd-sysv",
    "udev",
)
ABSENT = ("runc", "zstd")  # enrolment brings them, from the host's own package source
MASKED = (
    "apt-daily-upgrade.timer",
    "apt-daily.timer",
    "console-getty.service",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty.target",
    "ldconfig.service",
    "systemd-binfmt.service",
    "systemd-hwdb-update.service",
    "systemd-journal-flush.service",
    "systemd-pstore.service",
    "systemd-random-seed.service",
    "systemd-update-utmp.service",
    "systemd-update-utmp-runlevel.service",
)
SSHD = """\
PermitRootLogin prohibit-password
PasswordAuthentication no
KexAlgorithms curve25519-sha256
HostKey /etc/ssh/ssh_host_ed25519_key
UsePAM no
UseDNS no
PrintMotd no
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """`wanted`: the packages of the artifact list; all but `absent` are on the disk already, to save time."""

    name: str = "server-debian-12"
    suite: str = "bookworm"
    architecture: str = "amd64"
    kernel_package: str = "linux-image-cloud-amd64"
    size_bytes: int = 12 << 30
    base: tuple[str, ...] = BASE
    wanted: tuple[str, ...] = packages("x86_64")
    absent: tuple[str, ...] = ABSENT
    masked: tuple[str, ...] = MASKED
    sshd: str = SSHD

    @property
    def installed(self) -> tuple[str, ...]:
        return tuple(sorted({*self.base, *self.wanted} - set(self.absent)))

    def digest(self) -> str:
        return hashlib.sha256(json.dumps([FORMAT, asdict(self)], sort_keys=True).encode()).hexdigest()
