"""Which drivers this host has. The one rule: a driver's module is imported when it is chosen, not before."""

from __future__ import annotations

from dataclasses import dataclass

from hostagent.drivers.machine.protocol import MachineDriver
from hostagent.drivers.network.protocol import LinkDriver, RouteDriver
from hostagent.drivers.storage.protocol import StorageDriver
from hostagent.drivers.supervisor.protocol import SupervisorDriver


@dataclass(frozen=True, slots=True, kw_only=True)
class Drivers:
    """`machines` and `storages` by `traits.name`."""

    supervisor: SupervisorDriver
    machines: dict[str, MachineDriver]
    storages: dict[str, StorageDriver]
    links: LinkDriver
    routes: RouteDriver


def fake_drivers(supervisor: SupervisorDriver | None = None) -> Drivers:
    """Everything fake, sharing one `Faults` (reached as `drivers.links.faults` of the fake)."""
    from hostagent.drivers.fault import Faults
    from hostagent.drivers.machine.fake import FakeMachine
    from hostagent.drivers.network.fake import FakeLinks, FakeRoutes
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
    )
