"""What a host says of itself. Everything is probed, nothing assumed; a fact that cannot be known is None or empty."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuFact:
    id: int
    core_id: int
    socket_id: int
    numa_node: int
    siblings: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNodeFact:
    id: int
    memory_bytes: int
    hugepages_2m_total: int = 0
    hugepages_2m_free: int = 0
    hugepages_1g_total: int = 0
    hugepages_1g_free: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFact:
    name: str
    size_bytes: int
    is_rotational: bool
    model: str = ""
    is_mounted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFact:
    name: str
    mac: str
    mtu_bytes: int
    addresses: tuple[str, ...]
    speed_mbit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PciFact:
    bdf: str
    class_id: str
    vendor_id: str
    device_id: str
    numa_node: int | None
    iommu_group: int | None
    driver: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvmFact:
    """`usable` is the outcome of booting a tiny guest, never of the device's existence; `reason` says why not."""

    device_present: bool
    usable: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFact:
    """A program the drivers need; empty version = missing."""

    name: str
    path: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFact:
    """A place for volumes. `primary` is always there; others are named in `storage.toml`. `is_available`: its directory is."""

    name: str
    total_bytes: int
    free_bytes: int
    is_available: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """`schedulable_*`: what may be given to machines (the declared share, else nearly all). `conditions`: stable words,
    some with a subject after a colon (`foreign_forward_policy:ufw`, `no_swap`, `host_is_virtual_machine`,
    `several_global_ipv6_prefixes`, `not_limited:qemu:memory`, `data_interface_missing:eth1`, `config_not_understood:cpuz`,
    `storage_pool_low:primary`, `storage_pool_missing:backup`,
    `unreadable:disks:…`).
    `clock_unix_ms`: the host's wall clock, for whoever compares it with his own. `at_rest`: under what secrets rest.
    `tunnel_driver`: `kernel`, `userspace`, or empty where WireGuard cannot run. `storage_public_key`: PEM of the key to which
    volumes' keys are sealed for `volume.unlock`.
    """

    hostname: str
    architecture: str
    os_id: str
    os_version: str
    kernel_version: str
    boot_id: str
    machine_id: str
    agent_version: str
    supervisor: str
    is_virtual_machine: bool
    schedulable_cpus: int
    schedulable_memory_bytes: int
    state_free_bytes: int
    state_total_bytes: int
    kvm: KvmFact
    machine_drivers: tuple[str, ...]
    storage_drivers: tuple[str, ...]
    cpus: tuple[CpuFact, ...] = ()
    numa_nodes: tuple[NumaNodeFact, ...] = ()
    disks: tuple[DiskFact, ...] = ()
    interfaces: tuple[InterfaceFact, ...] = ()
    pci: tuple[PciFact, ...] = ()
    programs: tuple[ProgramFact, ...] = ()
    kernel_features: dict[str, bool] = field(default_factory=dict)
    conditions: tuple[str, ...] = ()
    clock_unix_ms: int = 0
    at_rest: str = ""
    data_interface: str = ""
    tunnel_driver: str = ""
    storage_public_key: str = ""
    pools: tuple[PoolFact, ...] = ()
