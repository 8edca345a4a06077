"""Which drivers this host has. The one rule: a driver's module is imported when it is chosen, not before."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hostagent.drivers.machine.protocol import MachineDriver
from hostagent.drivers.network.protocol import (
    FlowDriver,
    LinkDriver,
    RouteDriver,
    RuleDriver,
)
from hostagent.drivers.network.reach import (
    AddressDriver,
    SpeakerDriver,
    TunnelDriver,
    WayDriver,
)
from hostagent.drivers.storage.protocol import StorageDriver
from hostagent.drivers.supervisor.protocol import SupervisorDriver
from hostagent.lib.hostconfig import HostConfig
from hostagent.lib.paths import Paths
from hostagent.lib.seal import HostSealer


@dataclass(frozen=True, slots=True, kw_only=True)
class Drivers:
    """`machines` and `storages` by `traits.name`. `unlimited`: what cannot be limited here (`qemu:memory`)."""

    supervisor: SupervisorDriver
    machines: dict[str, MachineDriver]
    storages: dict[str, StorageDriver]
    links: LinkDriver
    routes: RouteDriver
    tunnels: TunnelDriver
    ways: WayDriver
    addresses: AddressDriver
    speaker: SpeakerDriver
    rules: RuleDriver
    flows: FlowDriver
    unlimited: tuple[str, ...] = ()


def fake_drivers(supervisor: SupervisorDriver | None = None) -> Drivers:
    """Everything fake, sharing one `Faults` (reached as `drivers.links.faults` of the fake)."""
    from hostagent.drivers.fault import Faults
    from hostagent.drivers.machine.fake import FakeMachine
    from hostagent.drivers.network.fake import (
        FakeAddresses,
        FakeFlows,
        FakeLinks,
        FakeRoutes,
        FakeRules,
        FakeSpeaker,
        FakeTunnels,
        FakeWays,
    )
    from hostagent.drivers.storage.fake import FakeStorage
    from hostagent.drivers.supervisor.fake import FakeSupervisor

    faults = Faults()
    below = supervisor or FakeSupervisor(faults)
    return Drivers(
        supervisor=below,
        machines={"fake": FakeMachine(below, faults)},
        storages={"fake": FakeStorage(faults)},
        links=FakeLinks(faults),
        routes=FakeRoutes(faults),
        tunnels=FakeTunnels(faults),
        ways=FakeWays(),
        addresses=FakeAddresses(faults),
        speaker=FakeSpeaker(),
        rules=FakeRules(faults),
        flows=FakeFlows(),
    )


async def host_drivers(paths: Paths, config: HostConfig) -> Drivers:
    """What this host has: a driver whose program is missing is not there, so a document that names it is refused.

    `drivers = "fake"` in host.toml (tests) starts processes that only sleep.
    """
    if config.drivers == "fake":
        return fake_drivers(None if config.supervisor == "fake" else _supervisor(paths, config))
    from hostagent.drivers.network import nft
    from hostagent.drivers.network.announce import Announcer
    from hostagent.drivers.network.bird import Bird, declared
    from hostagent.drivers.network.conntrack import Conntrack
    from hostagent.drivers.network.edgeways import EdgeWays
    from hostagent.drivers.network.links import LinkSet
    from hostagent.drivers.network.routes import RouteSet
    from hostagent.drivers.network.tunnel_keys import TunnelKeys
    from hostagent.drivers.network.wireguard import WireGuard

    below = _supervisor(paths, config)
    tunnels = WireGuard(below, paths, TunnelKeys(paths.tunnel_keys, HostSealer(paths.host_key)))
    machines = {driver.traits.name: driver for driver in _machines(paths, below)}
    if config.machine_drivers:
        machines = {name: driver for name, driver in machines.items() if name in config.machine_drivers}
    return Drivers(
        supervisor=below,
        machines=dict(machines),
        storages=_storages(paths, below),
        links=LinkSet(paths.owner()),
        routes=RouteSet(tunnels.names, paths.routes),
        tunnels=tunnels,
        ways=EdgeWays(tunnels.machine_id, paths.state / "edgeways.json"),
        addresses=Announcer(config.public_interface),
        speaker=Bird(below, paths, declared(config)),
        rules=nft.best(),
        flows=Conntrack(),
        unlimited=_unlimited(machines, below),
    )


def _supervisor(paths: Paths, config: HostConfig) -> SupervisorDriver:
    name = config.supervisor or ("systemd" if Path("/run/systemd/system").is_dir() else "plain")
    if name == "systemd":
        from hostagent.drivers.supervisor.systemd import SystemdSupervisor

        return SystemdSupervisor()
    from hostagent.drivers.supervisor.plain import PlainSupervisor

    return PlainSupervisor(paths.run)


def _machines(paths: Paths, below: SupervisorDriver) -> list[MachineDriver]:
    from hostagent.drivers.machine import qemu_command
    from hostagent.drivers.supervisor.cgroup import writable_hierarchies

    machines: list[MachineDriver] = [_cloud_hypervisor(paths, below)]
    if os.access(qemu_command.PROGRAM, os.X_OK):
        from hostagent.drivers.machine.kvm import device_groups, tsc_khz
        from hostagent.drivers.machine.qemu import QemuMachine

        machines.append(QemuMachine(below, paths, tsc_khz=tsc_khz(), kvm_groups=device_groups))
    if os.access("/usr/sbin/runc", os.X_OK):
        from hostagent.drivers.machine.container import LIMITS, ContainerMachine

        machines.append(ContainerMachine(below, paths, limits=LIMITS & frozenset(writable_hierarchies())))
    return machines


def _cloud_hypervisor(paths: Paths, below: SupervisorDriver) -> MachineDriver:
    """Always there: its program may come later, and until then it says what is missing."""
    from hostagent.drivers.machine.cloud_hypervisor import CloudHypervisorMachine
    from hostagent.drivers.machine.cloud_hypervisor_program import Program, has_landlock
    from hostagent.drivers.machine.kvm import device_groups

    return CloudHypervisorMachine(below, paths, Program(paths=paths), has_landlock=has_landlock(), kvm_groups=device_groups)


def _unlimited(machines: dict[str, MachineDriver], below: SupervisorDriver) -> tuple[str, ...]:
    """A VM is limited by its unit, a container by runc."""
    from hostagent.drivers.supervisor.cgroup import writable_hierarchies

    wanted = {
        "cloud_hypervisor": {"cpu", "memory"} - below.traits.limits,
        "qemu": {"cpu", "memory"} - below.traits.limits,
        "container": {"cpu", "memory", "pids"} - set(writable_hierarchies()),
    }
    return tuple(f"{name}:{limit}" for name in machines for limit in sorted(wanted.get(name, ())))


def _storages(paths: Paths, below: SupervisorDriver) -> dict[str, StorageDriver]:
    from hostagent.drivers.storage import qsd

    if not os.access(qsd.DAEMON, os.X_OK):
        return {}
    return {"qsd": qsd.QsdStorage(below, paths)}
