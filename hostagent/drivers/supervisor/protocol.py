"""Keeping a process alive outside the agent: systemd's transient units, or the plain supervisor.

The one rule: a unit never is a child of `serve`; it outlives the agent and is found again by name and incarnation.
The supervisor never restarts by itself: what a process's end means is decided by the verbs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from hostagent.lib.process import Incarnation

Limit = Literal["cpu", "memory", "cpuset", "tasks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorTraits:
    """`limits`: what can really be limited here (by probing cgroups); the rest is reported, never silently dropped."""

    name: Literal["systemd", "plain", "fake"]
    limits: frozenset[Limit] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLimits:
    """None = no limit. `cpu_cores` may be a fraction; `cpus` pins to host CPU numbers."""

    cpu_cores: float | None = None
    memory_bytes: int | None = None
    cpus: tuple[int, ...] = ()
    tasks: int | None = None
    open_files: int = 65_536
    locked_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitWanted:
    """One process. `name` is unique on the host (`vm-vm_01h…`, `volume-vol_01h…`), of [a-z0-9_-]; argv[0] an absolute path.

    stdin is /dev/null; stdout and stderr are appended to `log_path`. No secret stands in `argv` or `env`.
    `groups` are supplementary gids.
    """

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()
    directory: Path = Path("/")
    log_path: Path = Path("/dev/null")
    limits: UnitLimits = UnitLimits()
    stop_signal: Literal["SIGTERM", "SIGINT", "SIGKILL"] = "SIGTERM"
    stop_grace_seconds: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitObserved:
    """`exited` units are remembered (with how they ended) until `remove` or the next boot; None where it cannot be known."""

    name: str
    state: Literal["running", "exited"]
    incarnation: Incarnation | None
    exit_code: int | None = None
    exit_signal: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRendered:
    """What starts the unit, for golden tests: the supervisor's own argv and what it reads on stdin."""

    argv: tuple[str, ...]
    stdin: bytes = b""


class SupervisorDriver(Protocol):
    traits: SupervisorTraits

    def render(self, wanted: UnitWanted) -> UnitRendered: ...

    async def observe(self, name: str) -> UnitObserved | None: ...

    async def apply(self, wanted: UnitWanted) -> UnitObserved:
        """Running afterwards. A running unit is left alone (also with other argv); an exited one is started anew.

        Raises AgentError `supervisor.start_failed` (not retryable when the program does not exist).
        """
        ...

    async def remove(self, name: str) -> None:
        """Stop signal, grace, SIGKILL to the whole cgroup or session, then forget. Absent is success."""
        ...

    async def names(self) -> tuple[str, ...]:
        """All units of this agent, running and exited, also those no document knows."""
        ...
