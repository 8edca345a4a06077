"""Which Cloud Hypervisor a host has, and whether it may be used.

The one rule: one without `LEAST_VERSION` is not used (CVE-2026-45782, a use after free in virtio-block, is mended there), and
nothing else in its place.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

from hostagent.lib.paths import Paths
from hostagent.lib.program import run
from hostagent.protocol.errors import AgentError

NAME = "cloud-hypervisor"
LEAST_VERSION = (52, 0)
LEAST_LANDLOCK = 3
VERSION_SECONDS = 10.0
_LANDLOCK_CREATE_RULESET, _LANDLOCK_CREATE_RULESET_VERSION = 444, 1
_VERSION = re.compile(r"v?(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The newest that was installed below `/opt/bedplate`, or the one at `fixed`."""

    paths: Paths
    fixed: Path | None = None

    @property
    def path(self) -> Path:
        """Where it is, or would be: machines that run keep theirs, new ones take the last one installed."""
        directory = self.paths.programs / NAME
        if self.fixed is not None:
            return self.fixed
        found = [path for path in directory.glob(f"*/{NAME}") if path.is_file()]
        return max(found, key=lambda path: path.stat().st_mtime_ns, default=directory / NAME)

    async def missing(self) -> str:
        """`vmm_missing`, `vmm_too_old:<version>`, `vmm_broken` or ""."""
        if not self.path.is_file():
            return "vmm_missing"
        try:
            said = (await run(str(self.path), "--version", deadline_seconds=VERSION_SECONDS)).stdout.decode(errors="replace")
        except (AgentError, OSError):
            return "vmm_broken"
        matched = _VERSION.search(said)
        if matched is None:
            return "vmm_broken"
        version = int(matched[1]), int(matched[2])
        return "" if version >= LEAST_VERSION else f"vmm_too_old:{version[0]}.{version[1]}"

    async def check(self) -> None:
        """Raises AgentError `vm.vmm_missing`, `vm.vmm_too_old` or `vm.vmm_broken`, none retryable."""
        code, _, version = (await self.missing()).partition(":")
        words = {
            "vmm_missing": f"there is no {self.path}",
            "vmm_broken": f"{self.path} does not say its version",
            "vmm_too_old": f"{self.path} is {version}; {LEAST_VERSION[0]}.{LEAST_VERSION[1]} is the least",
        }
        if code == "vmm_missing":
            raise AgentError("vm.vmm_missing", words[code], retryable=False)
        if code == "vmm_too_old":
            raise AgentError("vm.vmm_too_old", words[code], retryable=False)
        if code:
            raise AgentError("vm.vmm_broken", words[code], retryable=False)


def has_landlock() -> bool:
    """Whether this kernel confines files as the VMM asks (Linux 6.2). Source: landlock_create_ruleset(2)."""
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return bool(syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_CREATE_RULESET_VERSION) >= LEAST_LANDLOCK)
