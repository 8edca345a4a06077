"""Where the agent keeps things. The one rule: no module spells a path; all take a `Paths`, so that tests root it elsewhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from hostagent.lib.process import kernel_boot_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """The product's normal paths by default. `run` is emptied by a reboot, the rest survives it."""

    state: Path = Path("/var/lib/bedplate")
    run: Path = Path("/run/bedplate")
    config: Path = Path("/etc/bedplate")
    programs: Path = Path("/opt/bedplate")
    log: Path = Path("/var/log/bedplate")
    machine_id: Path = Path("/etc/machine-id")

    @classmethod
    def under(cls, root: Path) -> Paths:
        """The same tree below `root` (short names: UNIX socket paths end at 107 bytes)."""
        return cls(state=root / "lib", run=root / "run", config=root / "etc", programs=root / "opt", log=root / "log")

    @property
    def socket(self) -> Path:
        """Where `serve` listens for `dispatch`."""
        return self.run / "agent.sock"

    @property
    def grants(self) -> Path:
        return self.run / "grants.json"

    @property
    def metrics_socket(self) -> Path:
        return self.run / "metrics.sock"

    def owner(self) -> str:
        """What tells this agent's links from those of another in the same network namespace: of its machine id."""
        machine_id = self.machine_id.read_text(encoding="ascii").strip() if self.machine_id.exists() else ""
        return hashlib.sha256(machine_id.encode()).hexdigest()[:8]

    @property
    def routes(self) -> Path:
        """Destinations of the routes that this agent has made."""
        return self.state / "routes.json"

    @property
    def wanted(self) -> Path:
        return self.state / "wanted"

    @property
    def tombstones(self) -> Path:
        return self.state / "tombstones"

    @property
    def blobs(self) -> Path:
        """Files by sha256, shared between images."""
        return self.state / "images" / "sha256"

    @property
    def uploads(self) -> Path:
        """Half-arrived files by sha256."""
        return self.state / "images" / "incoming"

    @property
    def image_disks(self) -> Path:
        """Images as read-only file systems, by the digest of their content, shared by the VMs of this host."""
        return self.state / "images" / "disk"

    @property
    def host_key(self) -> Path:
        return self.state / "host.key"

    @property
    def host_config(self) -> Path:
        """What the operator (or the lab) declares of this host: cpus, memory_bytes, data_interface …"""
        return self.config / "host.toml"

    @property
    def tunnel_keys(self) -> Path:
        return self.state / "tunnel"

    def image_directory(self, image_id: str) -> Path:
        """The image's files by their names (hard links into `blobs`)."""
        return self.state / "images" / image_id

    def volume_directory(self, volume_id: str) -> Path:
        return self.state / "volume" / volume_id

    def snapshot_directory(self, snapshot_id: str) -> Path:
        return self.state / "snapshot" / snapshot_id

    def vm_directory(self, vm_id: str) -> Path:
        return self.state / "vm" / vm_id

    def volume_run_directory(self, volume_id: str) -> Path:
        return self.run / "volume" / volume_id

    def vm_run_directory(self, vm_id: str) -> Path:
        return self.run / "vm" / vm_id

    def vm_log(self, vm_id: str) -> Path:
        return self.log / "vm" / f"{vm_id}.log"

    def boot_id(self) -> str:
        """The id of this boot. A file `boot_id` in `run` (a lab host's init writes it) stands before the kernel's."""
        try:
            return (self.run / "boot_id").read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return kernel_boot_id()
