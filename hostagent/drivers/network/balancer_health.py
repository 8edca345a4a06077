"""What is known of a service's backends, and what share of the flows each may have for it: pure, the time is told.

The one rule: knowledge only takes away. A backend has its whole share until something speaks against it, and what speaks
against it is said in words that a person reads. When more than half of a service's backends (and at least two) fall within
moments, or the last one does, it is more likely that we see badly than that they are all gone: the brake keeps them for a
while, and says so. It holds suspicions, never proofs, and is let go as soon as half of the backends are well again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hostagent.drivers.network.balancer_rules import FAMILIES, Family, address_of
from hostagent.protocol.network import BackendWanted, LoadBalancerWanted

BRAKE_SHARE = 0.5
BRAKE_AT_LEAST = 2
BRAKE_WINDOW_SECONDS = 2.0
BRAKE_HOLD_SECONDS = 60.0
RAMP_STEPS = 10
HALF_OPEN_SHARE = 0.05
UP = "up"
HELD = "most backends fell at once, or the last one"


@dataclass(slots=True, kw_only=True)
class Facts:
    """Of one backend. `probed`: by address family, None = not decided. `probe_reason`: why not; `refused`: by whose probes its
    machine itself says that nobody listens.

    `is_leaving`: its machine is being stopped, and still there. `is_ended`: its process is gone. `is_noticed`: its host says
    so. `is_silent`: nothing is heard of its host. `is_refuted`: a direct try failed after that.

    `circuit`: 1 closed, 0 open, between them half open. `away_since`: wall seconds when `draining` or `ejected` was first read.
    """

    probed: dict[Family, bool | None] = field(default_factory=dict)
    probe_reason: str = ""
    refused: set[Family] = field(default_factory=set)
    is_leaving: bool = False
    is_ended: bool = False
    is_noticed: bool = False
    is_silent: bool = False
    is_refuted: bool = False
    circuit: float = 1.0
    away_since: float = 0.0

    def is_proven(self, family: Family) -> bool:
        """Whether what speaks against it cannot be our own bad sight."""
        is_gone = self.is_refuted and (self.is_ended or self.is_noticed)
        return is_gone or (self.probed.get(family) is False and family in self.refused)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """`share` 0 to 1; `word`: `up`, `leaving`, `draining`, `ejected`, `down: …`, `held: …`, `circuit open`, `starting`."""

    share: float
    word: str


@dataclass(slots=True, kw_only=True)
class _Course:
    """How one backend's usability went in one address family, in monotonic seconds."""

    was_usable: bool | None = None
    fell_at: float | None = None
    rose_at: float | None = None
    held_until: float = 0.0


class ServiceHealth:
    """`assume_up`: after a restart of the agent, undecided probes count as passed."""

    def __init__(self, wanted: LoadBalancerWanted, *, assume_up: bool) -> None:
        self.wanted = wanted
        self.facts: dict[str, Facts] = {}
        self._courses: dict[tuple[str, Family], _Course] = {}
        self._assumed = frozenset(backend.id for backend in wanted.backends) if assume_up else frozenset()
        self.brakes = 0
        self.replace(wanted)

    def replace(self, wanted: LoadBalancerWanted) -> None:
        """Another document: what is known of backends that stay, stays known."""
        self.wanted = wanted
        names = {backend.id for backend in wanted.backends}
        self.facts = {name: self.facts.get(name) or Facts() for name in names}
        self._courses = {key: course for key, course in self._courses.items() if key[0] in names}

    def judge(self, now: float, wall: float) -> dict[Family, dict[str, Opinion]]:
        """By address family, of every backend that is not `removed` and has an address there."""
        return {family: self._judge_family(family, now, wall) for family in FAMILIES}

    def next_change(self, now: float, wall: float) -> float | None:
        """Seconds until time alone changes something: a ramp's step, the end of a hold or of an ejection."""
        found: list[float] = []
        step = self.wanted.slow_start_seconds / RAMP_STEPS
        for course in self._courses.values():
            if course.held_until > now:
                found.append(course.held_until - now)
            if step and course.rose_at is not None and now - course.rose_at < self.wanted.slow_start_seconds:
                found.append(step - (now - course.rose_at) % step)
        found += [
            self.facts[backend.id].away_since + backend.ejected_seconds - wall
            for backend in self.wanted.backends
            if backend.state == "ejected" and backend.ejected_seconds
        ]
        return min((seconds for seconds in found if seconds > 0), default=None)

    def _judge_family(self, family: Family, now: float, wall: float) -> dict[str, Opinion]:
        present = [b for b in self.wanted.backends if b.state != "removed" and address_of(b, family)]
        bad: dict[str, str] = {}
        for backend in present:
            reason = self._against(backend, family)
            self._note(backend.id, self._courses.setdefault((backend.id, family), _Course()), not reason, now)
            if reason:
                bad[backend.id] = reason
        self._brake(family, [backend for backend in present if self._is_active(backend, wall)], bad, now)
        return {backend.id: self._opinion(backend, family, bad.get(backend.id, ""), (now, wall)) for backend in present}

    def _is_active(self, backend: BackendWanted, wall: float) -> bool:
        if backend.state != "ejected" or not backend.ejected_seconds:
            return backend.state == "active"
        return wall - self.facts[backend.id].away_since >= backend.ejected_seconds

    def _against(self, backend: BackendWanted, family: Family) -> str:
        facts = self.facts[backend.id]
        if facts.is_ended:
            return "its machine ended"
        if facts.is_noticed:
            return "its host says that it ended"
        if facts.is_silent:
            return "nothing is heard of its host"
        if self.wanted.probe is not None:
            probed = facts.probed.get(family)
            if probed is False:
                return facts.probe_reason or "its probe fails"
            if probed is None and backend.id not in self._assumed:
                return "not probed yet"
        return "" if facts.circuit > 0 else "circuit open"

    def _note(self, name: str, course: _Course, is_usable: bool, now: float) -> None:
        if is_usable and course.was_usable is not True:
            is_new = course.was_usable is None and name in self._assumed
            course.rose_at = None if is_new or course.held_until > now else now
            course.fell_at, course.held_until = None, 0.0
        elif not is_usable and course.was_usable:
            course.fell_at = now
        course.was_usable = is_usable

    def _brake(self, family: Family, active: list[BackendWanted], bad: dict[str, str], now: float) -> None:
        courses = {backend.id: self._courses[backend.id, family] for backend in active if not self.facts[backend.id].is_leaving}
        well = sum(1 for name in courses if name not in bad)
        doubted = {name: one for name, one in courses.items() if name in bad and not self.facts[name].is_proven(family)}
        held = [name for name, course in doubted.items() if course.held_until > now]
        if held and len(held) <= well:  # we see again: who is still away is away
            for name in held:
                doubted.pop(name).held_until = 0.0
            held = []
        window = max(BRAKE_WINDOW_SECONDS, 2 * self.wanted.probe.interval_ms / 1000 if self.wanted.probe else 0.0)
        fallen = [
            course
            for course in doubted.values()
            if course.fell_at is not None and now - course.fell_at <= window and not course.held_until
        ]
        is_mass = len(fallen) >= BRAKE_AT_LEAST and len(fallen) > (well + len(fallen)) * BRAKE_SHARE
        if fallen and (is_mass or not (well or held)):
            self.brakes += 1
            for course in fallen:
                course.held_until = now + BRAKE_HOLD_SECONDS

    def _opinion(self, backend: BackendWanted, family: Family, reason: str, clock: tuple[float, float]) -> Opinion:
        now, wall = clock
        facts, course = self.facts[backend.id], self._courses[backend.id, family]
        if backend.state == "draining":
            return Opinion(share=0.0, word="draining")
        if not self._is_active(backend, wall):
            return Opinion(share=0.0, word="ejected")
        if facts.is_leaving and not (facts.is_ended or facts.is_noticed):
            return Opinion(share=0.0, word="leaving")
        if reason:
            if course.held_until > now and not facts.is_proven(family):
                return Opinion(share=1.0, word=f"held: {HELD} ({reason})")
            return Opinion(share=0.0, word=reason if reason == "circuit open" else f"down: {reason}")
        if facts.circuit < 1.0:
            return Opinion(share=HALF_OPEN_SHARE, word="circuit half open")
        slow = self.wanted.slow_start_seconds
        if slow and course.rose_at is not None and now - course.rose_at < slow:
            step = int((now - course.rose_at) / slow * RAMP_STEPS) + 1
            return Opinion(share=step / (RAMP_STEPS + 1), word="starting")
        return Opinion(share=1.0, word=UP)
