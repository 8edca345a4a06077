"""What goes into a guest image, as data; its digest is the image's name in the cache.

The one rule: everything that changes the image's content changes the digest: packages, files, and `FORMAT`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

FORMAT = 3
FILES = Path(__file__).with_name("rootfs")
PROGRAMS = {
    "boot": 0o755,
    "first-boot": 0o644,
    "flatten.awk": 0o644,
    "network": 0o644,
    "shutdown": 0o755,
    "sshd": 0o755,
    "user-data": 0o755,
    "workload": 0o755,
    "workload-runner": 0o755,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """`size_bytes` is the size of the file system; a larger disk is filled at first boot."""

    name: str = "debian-12"
    suite: str = "bookworm"
    architecture: str = "x86_64"
    kernel_package: str = "linux-image-cloud-amd64"
    default_user: str = "debian"
    size_bytes: int = 768 << 20
    cmdline: str = "console=ttyS0,115200 root=/dev/vda rw loglevel=4 panic=10 reboot=k net.ifnames=0"
    packages: tuple[str, ...] = (
        "busybox-static",
        "ca-certificates",
        "iproute2",
        "iputils-ping",
        "kmod",
        "netbase",
        "openssh-server",
        "procps",
        "python3",
        "python3-yaml",
        "sudo",
    )

    @property
    def debian_architecture(self) -> str:
        return {"x86_64": "amd64", "aarch64": "arm64"}[self.architecture]

    def digest(self) -> str:
        """sha256 over the recipe and every file it puts into the tree."""
        content = hashlib.sha256(json.dumps([FORMAT, asdict(self)], sort_keys=True).encode())
        for path in sorted(FILES.iterdir()):
            content.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
        return content.hexdigest()

    def tree_digest(self) -> str:
        """sha256 over what debootstrap is told: the base tree is kept while only our own files change."""
        return hashlib.sha256(json.dumps([self.suite, self.architecture, sorted(self.packages)]).encode()).hexdigest()
