"""All facts of the host in one answer. The one rule: a part that cannot be learned is empty and named in `conditions`."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from hostagent.drivers.machine.protocol import Installable
from hostagent.drivers.registry import Drivers
from hostagent.facts import hardware, kvm, system
from hostagent.facts.flows import flow_table
from hostagent.facts.sysfs import text
from hostagent.lib import pools
from hostagent.lib.hostconfig import HostConfig
from hostagent.lib.keyring import KeyRing
from hostagent.lib.paths import Paths
from hostagent.lib.seal import HostSealer
from hostagent.protocol.facts import HostFacts, InterfaceFact, KvmFact, PoolFact, ProgramFact

T = TypeVar("T")
_MOST_RESERVED_BYTES = 2 << 30
_LEAST_GLOBAL_PREFIXES = 2


class Learner:
    """Programs and kernel features are probed once a process; the rest is read anew each time."""

    def __init__(
        self, paths: Paths, config: HostConfig, drivers: Drivers | None, version: str, keyring: KeyRing | None = None
    ) -> None:
        self._paths = paths
        self._config = config
        self._drivers = drivers
        self._version = version
        self._keyring = keyring or KeyRing(paths, HostSealer(paths.host_key))
        self._kvm: asyncio.Task[KvmFact] | None = None
        self._features: dict[str, bool] | None = None
        self.kvm_probe: kvm.Probe = partial(kvm.probe, paths.image_directory(""))

    async def probe_kvm(self) -> KvmFact:
        """One probe at a time, for all who ask; one of them who gives up does not end it."""
        if self._kvm is None or self._kvm.done():
            answer = kvm.cached(self._paths.state / "kvm.json", self._paths.boot_id(), self.kvm_probe)
            self._kvm = asyncio.create_task(answer, name="probe KVM")
        return await asyncio.shield(self._kvm)

    async def learn(self) -> HostFacts:
        """Everything anew. Long, because it is one flat table: a line for each fact."""
        if self._features is None:
            self._features = await system.kernel_features()
        kvm_fact, programs, interfaces, policies = await asyncio.gather(
            self.probe_kvm(), system.programs(), system.interfaces(), system.forward_policies()
        )
        conditions: list[str] = [f"foreign_forward_policy:{policy.owner}" for policy in policies if policy.is_drop]
        release, memory = _read(system.os_release, {}, conditions), hardware.memory()
        state = os.statvfs(_existing(self._paths))
        cpus = _read(hardware.cpus, (), conditions)
        is_vm = _read(system.is_virtual_machine, False, conditions)
        conditions += _conditions(self._config, memory, interfaces, is_vm=is_vm)
        lacking = await _lacking(self._drivers)
        conditions += [reason for name, reason in lacking.items() if reason != "vmm_missing"]
        found_pools = pools.all_of(self._paths)
        conditions += _pool_conditions(found_pools, pools.declared(self._paths)[1])
        unlimited = self._drivers.unlimited if self._drivers else ()
        conditions += [f"not_limited:{what}" for what in unlimited if what.partition(":")[0] not in lacking]
        return HostFacts(
            hostname=platform.node(),
            architecture=platform.machine(),
            os_id=release.get("ID", "unknown"),
            os_version=release.get("VERSION_ID", ""),
            kernel_version=platform.release(),
            boot_id=self._paths.boot_id(),
            machine_id=text(self._paths.machine_id),
            agent_version=self._version,
            supervisor=self._drivers.supervisor.traits.name if self._drivers else system.supervisor(),
            is_virtual_machine=is_vm,
            schedulable_cpus=min(self._config.cpus or len(cpus), len(cpus) or 1),
            schedulable_memory_bytes=schedulable_memory(self._config, memory["MemTotal"]),
            state_free_bytes=state.f_bavail * state.f_frsize,
            state_total_bytes=state.f_blocks * state.f_frsize,
            kvm=kvm_fact,
            machine_drivers=_machine_drivers(self._drivers, kvm_fact, lacking),
            storage_drivers=tuple(sorted(self._drivers.storages)) if self._drivers else (),
            cpus=cpus,
            numa_nodes=_read(hardware.numa_nodes, (), conditions),
            disks=_read(hardware.disks, (), conditions),
            interfaces=interfaces,
            pci=_read(hardware.pci, (), conditions),
            programs=programs,
            kernel_features=self._features,
            conditions=tuple(conditions),
            clock_unix_ms=time.time_ns() // 1_000_000,
            at_rest="host_file",
            data_interface=self._config.data_interface,
            tunnel_driver=tunnel_driver(self._features, programs),
            storage_public_key=await self._keyring.public_key() if self._drivers else "",
            pools=tuple(_pool_fact(pool) for pool in found_pools),
        )


def _pool_fact(pool: pools.Pool) -> PoolFact:
    return PoolFact(name=pool.name, total_bytes=pool.total_bytes, free_bytes=pool.free_bytes, is_available=pool.is_available)


def _pool_conditions(found: tuple[pools.Pool, ...], unknown: tuple[str, ...]) -> list[str]:
    """A pool that fills up fails the writes of all thin volumes in it at once."""
    said = [f"config_not_understood:{name}" for name in unknown]
    said += [f"storage_pool_low:{pool.name}" for pool in found if pool.is_low]
    return said + [f"storage_pool_missing:{pool.name}" for pool in found if not pool.is_available]


def tunnel_driver(features: dict[str, bool], programs: tuple[ProgramFact, ...]) -> str:
    """`wg` tells both what to do; userspace needs taps besides."""
    found = {program.name for program in programs if program.path}
    if "wg" not in found:
        return ""
    if features.get("wireguard"):
        return "kernel"
    return "userspace" if "wireguard-go" in found and features.get("tun") else ""


def schedulable_memory(config: HostConfig, total_bytes: int) -> int:
    """The declared share; else all but a tenth, at most 2 GiB, which is the host's own."""
    if config.memory_bytes is not None:
        return min(config.memory_bytes, total_bytes)
    return total_bytes - min(total_bytes // 10, _MOST_RESERVED_BYTES)


async def _lacking(drivers: Drivers | None) -> dict[str, str]:
    """Drivers whose program is not there or not fit, with the reason."""
    found = {
        name: await driver.missing()
        for name, driver in (drivers.machines.items() if drivers else ())
        if isinstance(driver, Installable)
    }
    return {name: reason for name, reason in found.items() if reason}


def _machine_drivers(drivers: Drivers | None, kvm_fact: KvmFact, lacking: dict[str, str]) -> tuple[str, ...]:
    if drivers is None:
        return ()
    usable = (name for name, driver in drivers.machines.items() if kvm_fact.usable or not driver.traits.needs_kvm)
    return tuple(sorted(name for name in usable if name not in lacking))


def _conditions(config: HostConfig, memory: dict[str, int], interfaces: tuple[InterfaceFact, ...], *, is_vm: bool) -> list[str]:
    conditions = [f"config_not_understood:{name}" for name in config.unknown]
    if is_vm:
        conditions.append("host_is_virtual_machine")
    if memory["SwapTotal"] == 0:
        conditions.append("no_swap")
    if len(global_ipv6_prefixes(interfaces)) >= _LEAST_GLOBAL_PREFIXES:
        conditions.append("several_global_ipv6_prefixes")
    if config.data_interface and config.data_interface not in {interface.name for interface in interfaces}:
        conditions.append(f"data_interface_missing:{config.data_interface}")
    if flow_table().is_nearly_full:
        conditions.append("flow_table_nearly_full")
    return conditions


def global_ipv6_prefixes(interfaces: tuple[InterfaceFact, ...]) -> set[str]:
    prefixes = set()
    for interface in interfaces:
        for address in interface.addresses:
            parsed = ipaddress.ip_interface(address)
            if parsed.version == 6 and parsed.ip.is_global:
                prefixes.add(str(ipaddress.ip_network((parsed.ip, 64), strict=False)))
    return prefixes


def _read(function: Callable[[], T], default: T, conditions: list[str]) -> T:
    try:
        return function()
    except (OSError, ValueError, IndexError) as error:
        conditions.append(f"unreadable:{function.__name__}:{error}")
        return default


def _existing(paths: Paths) -> str:
    path = paths.state
    while not path.exists():
        path = path.parent
    return str(path)
