"""Wanted documents: what the control plane tells a host to have, each with a generation.

The one rule: a document is complete. The agent compares it with what it sees and can start from it alone after a reboot.
Sizes in bytes, addresses as text without prefix length unless the name says cidr, digests as lower-case sha256 hex.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Generation:
    """(deployment epoch, number): restoring a backup raises the epoch, so old numbers never win again."""

    epoch: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWanted:
    """One content-addressed file. `name` is relative, without `..`."""

    name: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageWanted:
    """A content-addressed set of files on the host: a guest image, model weights, an engine, a VMM.

    `image.ensure` answers Running(needs=[sha256…]) until every file was uploaded; then Succeeded with `path`.
    """

    id: str
    generation: Generation
    purpose: Literal["guest", "weights", "engine", "artifact"]
    files: tuple[FileWanted, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KekWanted:
    """The public half of a project's key-encryption key: RSA of 3072 bits or more, as PEM (SubjectPublicKeyInfo)."""

    id: str
    public_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EncryptionWanted:
    """How a volume rests. Its key is made on the host and never leaves it but wrapped.

    `unlock: host`: the key also rests sealed under the host's own, so a reboot needs nobody. `control_plane`: it does not, and
    after a reboot the volume is `locked` until `volume.unlock`; such a volume needs a `kek`. With a `kek` the key is wrapped to
    it and handed out with the volume (`keys`); another one wraps it anew. `cipher: none` is for benchmarks: a host refuses it
    unless its `host.toml` allows it. It says how data is *made*: what is there already keeps its form.
    """

    cipher: Literal["aes-xts", "none"] = "aes-xts"
    unlock: Literal["host", "control_plane"] = "host"
    kek: KekWanted | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QosWanted:
    """Limits of reads and writes together; 0 = none. A burst may last `burst_seconds` at the higher rate."""

    iops: int = 0
    bytes_per_second: int = 0
    burst_iops: int = 0
    burst_bytes_per_second: int = 0
    burst_seconds: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeWanted:
    """A disk. `image_id` + `image_file` name the read-only base (raw or qcow2, of an ensured image), or `snapshot_id` a
    snapshot of this host that it begins as, or all are empty. It lies in `pool` ("": the primary one) and never moves.

    A machine whose document names it in `disks` gets it, running ones at once where the machine driver can. `qos` takes effect
    at once; a larger `size_bytes` when the answer says (`takes_effect`); `num_queues` and `queue_size` (32 to 1024, a power of
    two) at the machine's next start.
    """

    id: str
    generation: Generation
    size_bytes: int
    image_id: str = ""
    image_file: str = ""
    snapshot_id: str = ""
    backend: Literal["qsd", "spdk", "fake"] = "qsd"
    pool: str = ""
    encryption: EncryptionWanted = EncryptionWanted()
    qos: QosWanted = QosWanted()
    num_queues: int = 1
    queue_size: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotWanted:
    """What a volume of this host held at one moment, kept until it is purged. It outlives the volume.

    It is taken by the first ensure and never again. It rests under its volume's key; `kek`: as in EncryptionWanted.
    """

    id: str
    generation: Generation
    volume_id: str
    backend: Literal["qsd", "spdk", "fake"] = "qsd"
    kek: KekWanted | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NicWanted:
    """One tap (a veth for containers), routed: the host routes `addresses` (a /32 and a /128) to it."""

    id: str
    generation: Generation
    mac: str
    ipv4: str
    ipv6: str
    mtu_bytes: int = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteWanted:
    """`destination_cidr` (one VM's /32 or /128, or a subnet) goes to the host whose data address is `via`.

    With a `slot`, `via` is empty and the packets go into that tunnel interface, whose peers know where to.
    """

    destination_cidr: str
    via: str
    slot: Literal["", "a", "b"] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkWanted:
    """All routes of this host to VMs on other hosts. Id is always `routes`: one document a host.

    `unreachable_cidrs`: encrypted networks. What no better route leads to is refused, never sent out in the clear.
    """

    id: str
    generation: Generation
    routes: tuple[RouteWanted, ...]
    unreachable_cidrs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedWanted:
    """What first boot reads (NoCloud). Sealed under the host's key at rest."""

    hostname: str
    user: str = "debian"
    ssh_authorized_keys: tuple[str, ...] = ()
    user_data: str = ""
    nameservers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBoot:
    """Direct kernel boot from files of the guest image."""

    kind: Literal["kernel"] = "kernel"
    kernel_file: str
    initramfs_file: str
    cmdline: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FirmwareBoot:
    kind: Literal["firmware"] = "firmware"
    firmware_file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MountWanted:
    """A read-only directory of an ensured image, seen at `path` inside the machine (container), or a disk (VM)."""

    image_id: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadWanted:
    """A command to keep running inside the machine (an inference engine); None for a plain VM.

    `root_image_id`: the image whose file `root.tar.zst` is the tree that the command sees as its root; a VM needs it beside
    its own image, a container's is its own image when this is empty. `secret_env` rests sealed under the host's key.
    """

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    secret_env: dict[str, str] = field(default_factory=dict)
    mounts: tuple[MountWanted, ...] = ()
    port: int = 0
    health_path: str = ""
    root_image_id: str = ""

    @property
    def image_ids(self) -> tuple[str, ...]:
        """Its root's and its mounts' images."""
        return (self.root_image_id, *(mount.image_id for mount in self.mounts))


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskWanted:
    volume_id: str
    is_boot: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VmWanted:
    """One machine of any isolation class. `driver` is chosen by the control plane from the host's traits.

    `power` is a field, not a verb; raising `restart_generation` restarts once. `home: movable` needs a live grant.
    """

    id: str
    generation: Generation
    driver: Literal["qemu", "cloud_hypervisor", "container", "fake"]
    vcpus: int
    memory_bytes: int
    image_id: str
    boot: KernelBoot | FirmwareBoot | None
    disks: tuple[DiskWanted, ...]
    nics: tuple[NicWanted, ...]
    seed: SeedWanted
    power: Literal["running", "stopped"] = "running"
    restart_generation: int = 0
    on_guest_poweroff: Literal["stop", "restart"] = "stop"
    home: Literal["pinned", "movable"] = "pinned"
    workload: WorkloadWanted | None = None

    @property
    def image_ids(self) -> tuple[str, ...]:
        """Every image that must lie on the host before the machine starts, each once."""
        named = (self.image_id, *(self.workload.image_ids if self.workload else ()))
        return tuple(dict.fromkeys(image_id for image_id in named if image_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class Purge:
    """Make it gone. Absent is success; a tombstone refuses late ensures of this generation or older for 30 days."""

    id: str
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One object as the host sees it. `state` is the verb's own word (`running`, `stopped`, `present`, `absent`, `failed`)."""

    id: str
    kind: Literal[
        "vm",
        "volume",
        "snapshot",
        "image",
        "nic",
        "network",
        "policy",
        "firewall",
        "tunnel",
        "address",
        "loadbalancer",
        "notices",
        "edgeways",
    ]
    generation: Generation | None
    state: str
    detail: dict[str, str | int | float | bool | None] = field(default_factory=dict)
