"""What a verb stands on: paths, drivers, documents, rules, jobs, events. The one rule: verbs keep no state of their own."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from hostagent.drivers.network.balancer import Balancers
from hostagent.drivers.network.balancer_counts import BalancerCounts
from hostagent.drivers.network.balancer_notices import Notices
from hostagent.drivers.network.firewall import Firewalls
from hostagent.drivers.network.ruleset import Ruleset
from hostagent.drivers.registry import Drivers
from hostagent.lib.hostconfig import HostConfig
from hostagent.lib.keyring import KeyRing
from hostagent.lib.lock import KeyedLocks
from hostagent.lib.paths import Paths
from hostagent.lib.process import Incarnation
from hostagent.lib.seal import HostSealer
from hostagent.protocol.facts import HostFacts, KvmFact
from hostagent.protocol.wanted import Generation
from hostagent.verbs.documents import Documents, Key
from hostagent.verbs.eventlog import EventLog
from hostagent.verbs.grants import Grants
from hostagent.verbs.jobs import Jobs
from hostagent.verbs.records import Records
from hostagent.verbs.tickets import Tickets


async def _no_kvm() -> KvmFact:
    return KvmFact(device_present=False, usable=False, reason="not probed")


async def _no_facts() -> HostFacts:
    raise NotImplementedError


@dataclass(slots=True, kw_only=True)
class Agent:
    """One host's agent. `settle_seconds`: how long an ensure waits for its work before it answers Running.

    `poke` asks the keeper to look at an object at once; `watch` to do so when a process ends. `yielded`: addresses left to
    another host that says to have them, `taken`: those taken from a dead holder; each with the generation of its document.
    `told`: those that the control plane spoke of since the agent began.
    """

    paths: Paths
    config: HostConfig
    drivers: Drivers
    documents: Documents
    records: Records
    events: EventLog
    jobs: Jobs
    tickets: Tickets
    rules: Ruleset
    balancers: Balancers
    balancer_counts: BalancerCounts
    notices: Notices
    keyring: KeyRing
    version: str
    probe_kvm: Callable[[], Awaitable[KvmFact]] = _no_kvm
    learn_facts: Callable[[], Awaitable[HostFacts]] = _no_facts
    firewalls: Firewalls = field(default_factory=Firewalls)
    admission: KeyedLocks = field(default_factory=KeyedLocks)
    uploads: KeyedLocks = field(default_factory=KeyedLocks)
    disks: KeyedLocks = field(default_factory=KeyedLocks)
    keys_of: KeyedLocks = field(default_factory=KeyedLocks)
    grants: Grants = field(default_factory=Grants)
    yielded: dict[str, Generation] = field(default_factory=dict)
    taken: dict[str, Generation] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    settle_seconds: float = 1.0
    monotonic: Callable[[], float] = time.monotonic
    poke: Callable[[Key], None] = lambda _key: None
    watch: Callable[[Key, Incarnation], None] = lambda _key, _incarnation: None

    @property
    def boot_id(self) -> str:
        return self.paths.boot_id()


async def open_agent(paths: Paths, config: HostConfig, drivers: Drivers, *, version: str) -> Agent:
    """An agent with its documents read, doing nothing yet."""
    events = EventLog()
    documents = Documents(paths, HostSealer(paths.host_key))
    await documents.load()
    rules = Ruleset(drivers.rules)
    grants = Grants()
    grants.load(paths)
    balancers = Balancers(rules, paths.state / "balancer", drivers.flows)
    return Agent(
        paths=paths,
        config=config,
        drivers=drivers,
        documents=documents,
        records=Records(paths, config.uid_base),
        events=events,
        jobs=Jobs(events),
        tickets=Tickets(),
        grants=grants,
        rules=rules,
        balancers=balancers,
        balancer_counts=BalancerCounts(balancers),
        notices=Notices(balancers),
        keyring=KeyRing(paths, HostSealer(paths.host_key)),
        version=version,
    )
