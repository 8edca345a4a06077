"""The link to hosts as programs see it. The one rule: programs take a `HostLinks`; only entry points make a real one.

Errors: `HostUnreachable` (the host or its agent cannot be reached: try again), `HostKeyChanged` (the host shows another
key than the pinned one: an operator must look), `AgentError` (the agent answered with an error: `code`, `retryable`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

from hostagent.protocol.errors import AgentError
from hostagent.protocol.facts import HostFacts
from hostagent.protocol.frames import Event
from hostagent.protocol.network import (
    AddressWanted,
    EdgeWaysWanted,
    FirewallWanted,
    LoadBalancerWanted,
    NoticesWanted,
    PolicyWanted,
    TunnelWanted,
)
from hostagent.protocol.results import Failed, Running, Succeeded
from hostagent.protocol.verbs import Cursor, HostObserved, StreamRequest
from hostagent.protocol.wanted import (
    Generation,
    ImageWanted,
    NetworkWanted,
    NicWanted,
    Observed,
    SnapshotWanted,
    VmWanted,
    VolumeWanted,
)

Result = Running | Succeeded | Failed
HostWanted = PolicyWanted | FirewallWanted | TunnelWanted | AddressWanted | LoadBalancerWanted | NoticesWanted | EdgeWaysWanted
Wanted = ImageWanted | VolumeWanted | SnapshotWanted | NicWanted | NetworkWanted | VmWanted | HostWanted

__all__ = [
    "AgentError",
    "Events",
    "HostKeyChanged",
    "HostLinks",
    "HostUnreachable",
    "KeyRefused",
    "Result",
    "Stream",
    "Wanted",
    "kind_of",
]

_KINDS: dict[type, str] = {
    ImageWanted: "image",
    VolumeWanted: "volume",
    SnapshotWanted: "snapshot",
    NicWanted: "nic",
    NetworkWanted: "network",
    VmWanted: "vm",
    PolicyWanted: "policy",
    FirewallWanted: "firewall",
    TunnelWanted: "tunnel",
    AddressWanted: "address",
    LoadBalancerWanted: "loadbalancer",
    NoticesWanted: "notices",
    EdgeWaysWanted: "edgeways",
}


class HostUnreachable(Exception):
    """The host did not answer in time, refused the connection or the login, or its agent is not running."""

    def __init__(self, host_id: str, detail: str) -> None:
        self.host_id = host_id
        self.detail = detail
        super().__init__(f"{host_id}: {detail}")


class KeyRefused(HostUnreachable):
    """The host answers, and does not let the control plane's key in: the agent was never there, or is taken off."""


class HostKeyChanged(Exception):
    """The host showed another key than the pinned one. Nothing was sent to it."""

    def __init__(self, host_id: str, expected: str, found: str) -> None:
        self.host_id = host_id
        self.expected = expected
        self.found = found
        super().__init__(f"{host_id}: the host key is {found}, pinned is {expected}")


def kind_of(wanted: Wanted) -> str:
    """The noun of a wanted document: `vm` of a VmWanted."""
    return _KINDS[type(wanted)]


class Stream(Protocol):
    """Raw bytes both ways, in a channel of their own; the channel's window is the back-pressure."""

    async def read(self, limit: int = 65_536) -> bytes:
        """b"" at the end; raises HostUnreachable when the connection breaks."""
        ...

    async def write(self, data: bytes) -> None: ...

    async def write_eof(self) -> None: ...

    async def close(self) -> None: ...


class Events(Protocol):
    """A subscription. Iterating raises HostUnreachable when the connection breaks."""

    cursor: Cursor

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def close(self) -> None: ...


class HostLinks(Protocol):
    """Every call names its host and has a deadline; nothing is retried here, that is the program's work."""

    async def call(self, host_id: str, verb: str, body: object, *, deadline_seconds: float = 30.0) -> Any:
        """The answer as the dataclass that `hostagent.protocol.verbs.ANSWER` names."""
        ...

    async def ensure(self, host_id: str, wanted: Wanted, *, deadline_seconds: float = 30.0) -> Result: ...

    async def purge(
        self, host_id: str, kind: str, object_id: str, generation: Generation, *, deadline_seconds: float = 30.0
    ) -> Result: ...

    async def observe(self, host_id: str, kind: str, object_id: str, *, deadline_seconds: float = 30.0) -> Observed | None: ...

    async def observe_host(self, host_id: str, *, deadline_seconds: float = 30.0) -> HostObserved: ...

    async def facts(self, host_id: str, *, deadline_seconds: float = 60.0) -> HostFacts: ...

    async def upload(self, host_id: str, path: Path, sha256: str, *, deadline_seconds: float = 3600.0) -> None:
        """Send one file that a wanted image on that host names; a cut upload goes on where it stopped. Sending what the
        host has already is quick success. Raises AgentError (`upload.digest_mismatch`, `disk.full`, `upload.unwanted`).
        """
        ...

    async def open_stream(self, host_id: str, request: StreamRequest, *, deadline_seconds: float = 30.0) -> Stream: ...

    async def subscribe(self, host_id: str, cursor: Cursor, *, deadline_seconds: float = 30.0) -> Events: ...

    async def forget(self, host_id: str) -> None:
        """Close what is open to this host (it was removed, or its address or key changed). Never fails."""
        ...

    async def close(self) -> None: ...
