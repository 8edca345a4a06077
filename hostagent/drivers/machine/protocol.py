"""What runs a tenant's workload: microVM, VM or container, behind five words.

The one rule: a driver gets a `MachinePlan` in which everything is resolved (paths, interfaces, sockets, uids), so `render`
is pure, and no driver looks anything up. Optional abilities are Protocols of their own; no driver stubs what it lacks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from hostagent.drivers.supervisor.protocol import UnitWanted
from hostagent.lib.process import Incarnation
from hostagent.protocol.wanted import NicWanted, VmWanted

DiskTransport = Literal["vhost_user_blk", "file"]
NicKind = Literal["tap", "veth"]
MountForm = Literal["directory", "disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineTraits:
    """`disk_transport`, `nic_kind`, `mount_form`: in what form disks, nics and shared images must be handed over. `boots`:
    accepted kinds of `boot`. `max_mounts`: shared images of one workload, its root among them. `needs_workload`: there is
    nothing else that it could run.
    """

    name: Literal["qemu", "cloud_hypervisor", "container", "fake"]
    isolation: Literal["microvm", "vm", "container"]
    disk_transport: DiskTransport
    nic_kind: NicKind
    mount_form: MountForm
    boots: frozenset[Literal["kernel", "firmware", "none"]]
    needs_kvm: bool = False
    has_console: bool = True
    can_hotplug: bool = False
    can_resize: bool = False
    can_snapshot: bool = False
    needs_workload: bool = False
    max_mounts: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskAttachment:
    """`path` is a vhost-user socket or a raw file, by `transport`."""

    volume_id: str
    transport: DiskTransport
    path: Path
    is_boot: bool = False
    num_queues: int = 1
    queue_size: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class NicAttachment:
    """A tap of this name exists and belongs to the machine's uid; or (veth) the host's end exists and its peer, named
    `peer`, is moved into the machine's own network namespace by the machine driver.
    """

    nic: NicWanted
    interface: str
    kind: NicKind
    peer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MountAttachment:
    """An image of the host, shared with other machines, read-only inside at `path`. `source`: its directory, or (`disk`) a
    file system with what lies there; of the workload's root with what its archive holds.
    """

    source: Path
    path: str
    form: MountForm = "directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePlan:
    """One machine with everything resolved.

    `run_directory` (tmpfs, emptied by a reboot) holds sockets and the seed in plain; `state_directory` survives.
    `uid`/`gid` are numbers of this machine alone; with `uid_count` > 1 a whole range (container's user namespace).
    `seed` is the NoCloud seed: `meta-data`, `user-data`, `network-config`. `is_kvm_usable` is the host's probed fact.
    `root` is the tree of the workload (`path` is `/`); None: the machine's own image.
    """

    vm: VmWanted
    disks: tuple[DiskAttachment, ...]
    nics: tuple[NicAttachment, ...]
    image_directory: Path
    run_directory: Path
    state_directory: Path
    log_path: Path
    uid: int
    gid: int
    uid_count: int = 1
    root: MountAttachment | None = None
    mounts: tuple[MountAttachment, ...] = ()
    cpus: tuple[int, ...] = ()
    seed: dict[str, str] = field(default_factory=dict)
    is_kvm_usable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedFile:
    """`path` absolute, owner the machine's uid. `is_secret` files are 0400 and must lie in the run directory."""

    path: Path
    content: bytes
    is_secret: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRendered:
    """Files first, then units in this order; the last unit is the machine itself (others: helpers it needs)."""

    files: tuple[RenderedFile, ...]
    units: tuple[UnitWanted, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineObserved:
    """`stopped` with an `exit_reason`: how its last run ended. `incarnation` while running: serve holds its pidfd.

    `console_socket` is a UNIX stream socket of the serial console ("" where there is none).
    """

    vm_id: str
    state: Literal["running", "stopped"]
    incarnation: Incarnation | None = None
    exit_reason: Literal["", "guest_poweroff", "killed", "failed"] = ""
    exit_detail: str = ""
    console_socket: str = ""
    log_path: str = ""


class MachineDriver(Protocol):
    traits: MachineTraits

    def render(self, plan: MachinePlan) -> MachineRendered:
        """Pure and total: same plan, same bytes. Raises AgentError `vm.unsupported` (not retryable) for what the
        driver cannot do.
        """
        ...

    async def observe(self, vm_id: str) -> MachineObserved | None:
        """None = no trace of it in this boot. Never guesses: a dead process whose end is unknown is `stopped`, `killed`."""
        ...

    async def apply(self, plan: MachinePlan) -> MachineObserved:
        """Make `plan.vm.power` so. running: started unless it runs already (a running machine is left alone even when the
        plan differs). stopped: orderly power-off, after the grace hard. Returns when its process runs, not when the guest
        is up. May take minutes (a root tree is unpacked once); is cancelled safely at any await.
        """
        ...

    async def remove(self, vm_id: str) -> None:
        """Stop hard, then delete all that `apply` made outside the plan's directories. Absent is success."""
        ...

    async def vm_ids(self) -> tuple[str, ...]:
        """All machines of this driver on the host, also those no document knows."""
        ...


@runtime_checkable
class Installable(Protocol):
    """A driver whose program the control plane brings, also after the agent started."""

    async def missing(self) -> str:
        """Why it cannot be used now (`vmm_missing`, `vmm_too_old:51.1`); "" when it can."""
        ...


@runtime_checkable
class DiskPlugs(Protocol):
    """Disks of a running machine (traits.can_hotplug). All raise AgentError `vm.plug_failed` where its VMM does not answer."""

    async def plugged(self, vm_id: str) -> frozenset[str]:
        """The volumes that it has now, also those that its guest was asked to let go."""
        ...

    async def plug(self, vm: VmWanted, disk: DiskAttachment) -> None:
        """In the guest's sight afterwards. Raises AgentError `vm.plug_failed`, also where no slot is free."""
        ...

    async def unplug(self, vm_id: str, volume_id: str, *, seconds: float) -> bool:
        """Ask the guest to let it go; False: it has not within `seconds`. Absent is success."""
        ...


@runtime_checkable
class Resets(Protocol):
    """A machine whose disk's daemon died, where that forgot what was in flight. Both raise AgentError `vm.plug_failed`."""

    async def unanswered(self, vm_id: str, volume_id: str) -> int | None:
        """Requests that the guest has made of this disk and nobody has answered yet. None: nobody knows."""
        ...

    async def reset(self, vm_id: str) -> None:
        """As by the reset button: the guest begins anew, in the same process."""
        ...


@runtime_checkable
class Snapshots(Protocol):
    """Memory and device state to a directory and back (traits.can_snapshot)."""

    async def snapshot(self, vm_id: str, directory: Path) -> None: ...

    async def restore(self, plan: MachinePlan, directory: Path) -> MachineObserved: ...


@runtime_checkable
class LiveMoves(Protocol):
    """Sending a running machine to another host."""

    async def receive(self, plan: MachinePlan, url: str) -> None: ...

    async def send(self, vm_id: str, url: str) -> None: ...
