"""The names of the verbs and the types of their bodies.

| verb | body | answer body |
|---|---|---|
| `facts.observe` | Nothing | facts.HostFacts |
| `host.observe` | Nothing | HostObserved: every object, also those no document knows |
| `host.reboot` | Reboot | Nothing; then the host goes down and comes up again |
| `host.uninstall` | Uninstall | Nothing; then the agent goes, and at last the login user and its key |
| `<kind>.ensure` | the wanted document of `ENSURE` | results.Outcome |
| `<kind>.purge` | wanted.Purge | results.Outcome |
| `<kind>.observe` | Subject | ObjectObserved: Observed or null |
| `traffic.observe` | Subject: a load balancer | TrafficObserved: what its backends carried here |
| `volume.unlock` | VolumeUnlock | Unlocked: which keys of the volume are still not there |
| `stream.open` | StreamRequest | StreamTicket: valid once, for 60 s, as SSH command `stream <ticket>` |
| `events.subscribe` | Cursor | Cursor; then Event frames follow on this channel |

An ensure or purge whose work is not done within a moment answers Running; the work goes on, and its end is an event
`object.settled`. A finished result is handed out once; asking after that means looking again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hostagent.protocol import facts, network, results, wanted

KIND_NAMES = (
    "policy",
    "firewall",
    "tunnel",
    "network",
    "image",
    "volume",
    "snapshot",
    "nic",
    "vm",
    "loadbalancer",
    "notices",
    "edgeways",
    "address",
)

ENSURE: dict[str, type] = {
    "image.ensure": wanted.ImageWanted,
    "volume.ensure": wanted.VolumeWanted,
    "snapshot.ensure": wanted.SnapshotWanted,
    "nic.ensure": wanted.NicWanted,
    "network.ensure": wanted.NetworkWanted,
    "policy.ensure": network.PolicyWanted,
    "firewall.ensure": network.FirewallWanted,
    "tunnel.ensure": network.TunnelWanted,
    "address.ensure": network.AddressWanted,
    "loadbalancer.ensure": network.LoadBalancerWanted,
    "notices.ensure": network.NoticesWanted,
    "edgeways.ensure": network.EdgeWaysWanted,
    "vm.ensure": wanted.VmWanted,
}
PURGE = tuple(name.replace(".ensure", ".purge") for name in ENSURE)
OBSERVE = tuple(name.replace(".ensure", ".observe") for name in ENSURE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """An empty body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uninstall:
    """`machine_id`: of the host that is meant, so that no other is taken off by mistake. Refused while documents remain."""

    machine_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reboot:
    """`boot_id`: the boot that is to end; in another one there is nothing to do."""

    machine_id: str
    boot_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    id: str


GRANT_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """These movable machines may run, these addresses be held against others, until `seconds` (at most GRANT_SECONDS) after
    `stamp`, which the host gave out; "" asks for one only.
    """

    ids: tuple[str, ...] = ()
    stamp: str = ""
    seconds: float = GRANT_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """`stamp`: for the next grant; it says when this answer was given, by the host's clock of this boot."""

    stamp: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedKey:
    """A volume's key on its way to the host: base64 of RSA-OAEP (SHA-256, MGF1 with SHA-256, label `unlock:<id>`) to the host's
    `storage_public_key`. `id` is the key's, which is the id of the volume that it was made for.
    """

    id: str
    sealed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeUnlock:
    """The keys that a locked volume asked for in `needs`: its own, and of what it was cloned from."""

    id: str
    keys: tuple[SealedKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlocked:
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectObserved:
    """None: the host has neither the object nor a document of it."""

    object: wanted.Observed | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendTraffic:
    """What a backend carried through this host since the host has its table. `in` is towards the backend; `refused`: resets to
    a SYN, `resets`: later ones of the backend. `live_flows` None: the host has too many flows to count them.
    """

    id: str
    bytes_in: int = 0
    bytes_out: int = 0
    packets_in: int = 0
    packets_out: int = 0
    flows: int = 0
    refused: int = 0
    resets: int = 0
    live_flows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficObserved:
    """Read at most five seconds ago. Empty for a load balancer that this host does not carry."""

    backends: tuple[BackendTraffic, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A position in the event log; log "" means from now on. An unknown log or a dropped seq is answered by the event
    `events.reset`, after which everything must be observed.
    """

    log: str = ""
    seq: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostObserved:
    """`cursor`: subscribe from here and nothing that changed after this observation is missed."""

    objects: tuple[wanted.Observed, ...]
    boot_id: str
    agent_version: str
    cursor: Cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """`console` and `log` name a VM; `tcp` a VM and a port on its address; `upload` a file by digest.

    An upload stream carries raw bytes from the ticket's `offset` to `size_bytes`, then one line of JSON comes back; the
    agent verifies the sha256 before the file gets its name. Only files that a wanted image names are taken.
    `log` sends the last `offset` bytes first, and goes on when `follow`.
    """

    kind: Literal["console", "log", "tcp", "upload"]
    id: str = ""
    port: int = 0
    sha256: str = ""
    size_bytes: int = 0
    offset: int = 0
    follow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTicket:
    """`offset`: how much of an upload the host has already."""

    ticket: str
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadResult:
    """The line that ends an upload stream; `code` "" means the file is in place."""

    sha256: str
    size_bytes: int
    code: str = ""
    message: str = ""


BODY: dict[str, type] = {
    "facts.observe": Nothing,
    "host.observe": Nothing,
    "host.reboot": Reboot,
    "host.uninstall": Uninstall,
    "stream.open": StreamRequest,
    "traffic.observe": Subject,
    "vm.grant": Grant,
    "volume.unlock": VolumeUnlock,
    "events.subscribe": Cursor,
    **ENSURE,
    **dict.fromkeys(PURGE, wanted.Purge),
    **dict.fromkeys(OBSERVE, Subject),
}
ANSWER: dict[str, type] = {
    "facts.observe": facts.HostFacts,
    "host.observe": HostObserved,
    "host.reboot": Nothing,
    "host.uninstall": Nothing,
    "stream.open": StreamTicket,
    "traffic.observe": TrafficObserved,
    "vm.grant": Granted,
    "volume.unlock": Unlocked,
    "events.subscribe": Cursor,
    **dict.fromkeys(ENSURE, results.Outcome),
    **dict.fromkeys(PURGE, results.Outcome),
    **dict.fromkeys(OBSERVE, ObjectObserved),
}
