"""What a host learns of its services' backends: from probes, from its own machines, from other hosts, from circuits.

The one rule: learning only writes facts down and says which service they concern. What follows from them is decided elsewhere,
once, however many facts came together.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable
from dataclasses import replace
from typing import TypeVar

from hostagent.drivers.network.balancer_health import Facts
from hostagent.drivers.network.balancer_rules import FAMILIES, Family
from hostagent.drivers.network.balancer_service import Service, target_of, targets_of
from hostagent.probes.attempt import attempt
from hostagent.probes.prober import Prober, Target, Verdict
from hostagent.protocol.errors import AgentError
from hostagent.protocol.network import ProbeWanted

logger = logging.getLogger(__name__)
CONFIRM_MS = 100
DEFAULT_PROBE = ProbeWanted(kind="tcp", timeout_ms=CONFIRM_MS)

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Learning(ABC):
    """`services` by id; `prober` asks for their targets."""

    def __init__(self) -> None:
        self.services: dict[str, Service] = {}
        self.prober = Prober(self._probed)
        self._by_target: dict[Target, tuple[str, ...]] = {}
        self._by_nic: dict[str, tuple[tuple[str, str], ...]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    def _learn(self, service_id: str, kind: str, at: float | None = None) -> None:
        """A fact of this service is another now; `at`: monotonic seconds when that could be known first."""

    def _index(self, service: Service) -> None:
        service.targets = targets_of(service.wanted)
        for target in service.targets:
            _enter(self._by_target, target, service.wanted.id)
        for backend in service.wanted.backends:
            if backend.nic_id and backend.state != "removed":
                _enter(self._by_nic, backend.nic_id, (service.wanted.id, backend.id))

    def _forget_indexes(self, service: Service) -> None:
        for backend in service.wanted.backends:
            _leave(self._by_nic, backend.nic_id, (service.wanted.id, backend.id))
        for target in service.targets:
            _leave(self._by_target, target, service.wanted.id)

    def _probe(self, service: Service, *, assume_up: bool) -> None:
        self.prober.want(service.wanted.id, service.targets, assume_up=assume_up)
        for target, (name, family) in service.targets.items():  # somebody else may have asked long ago
            verdict = self.prober.verdict(target)
            if verdict.is_up is not None:
                _note(service.health.facts[name], family, verdict)

    def _probed(self, target: Target) -> None:
        verdict = self.prober.verdict(target)
        for service_id in self._by_target.get(target, ()):
            name, family = self.services[service_id].targets[target]
            _note(self.services[service_id].health.facts[name], family, verdict)
            self._learn(service_id, "probe")

    def machine(self, nic_ids: Iterable[str], *, is_running: bool) -> None:
        """A machine of this host with these nics runs, or its process has ended."""
        nic_ids = tuple(nic_ids)
        self._set(nic_ids, "is_ended", not is_running, "process")
        self.leaving(nic_ids, is_leaving=False)

    def leaving(self, nic_ids: Iterable[str], *, is_leaving: bool) -> tuple[str, ...]:
        """A machine with these nics is going to be stopped, here or on another host; the services whose it is."""
        return self._set(nic_ids, "is_leaving", is_leaving, "planned")

    def notice(self, nic_ids: Iterable[str], *, has_ended: bool) -> None:
        """Another host says so of its machines."""
        self._set(nic_ids, "is_noticed", has_ended, "notice")

    def heard(self, nic_ids: Iterable[str]) -> None:
        """Their host is there."""
        self._set(nic_ids, "is_silent", False, "silence")

    def silence(self, nic_ids: Iterable[str]) -> None:
        """Nothing is heard of the machines' host; believed when a direct try fails too."""
        at = time.monotonic()
        for nic_id in nic_ids:
            for service_id, name in self._by_nic.get(nic_id, ()):
                self._background(self._confirm(service_id, name, "is_silent", at))

    def circuit(self, service_id: str, name: str, share: float) -> None:
        facts = self._facts(service_id, name)
        if facts is not None and facts.circuit != share:
            facts.circuit = share
            self._learn(service_id, "circuit")

    def _set(self, nic_ids: Iterable[str], fact: str, value: bool, kind: str) -> tuple[str, ...]:
        """The services for which that is news."""
        found: list[str] = []
        for nic_id in nic_ids:
            for service_id, name in self._by_nic.get(nic_id, ()):
                facts = self.services[service_id].health.facts[name]
                if getattr(facts, fact) == value:
                    continue
                setattr(facts, fact, value)
                if not (facts.is_ended or facts.is_noticed):
                    facts.is_refuted = False
                found.append(service_id)
                self._learn(service_id, kind)
        return tuple(dict.fromkeys(found))

    async def _confirm(self, service_id: str, name: str, fact: str, at: float) -> None:
        """Try the backend directly, at every address; `fact` is true when none answers."""
        service = self.services.get(service_id)
        backend = next((b for b in service.wanted.backends if b.id == name), None) if service else None
        if service is None or backend is None:
            return
        probe = replace(service.wanted.probe or DEFAULT_PROBE, timeout_ms=CONFIRM_MS)
        targets = [target_of(service.wanted, backend, family, probe) for family in FAMILIES]
        findings = await asyncio.gather(*(attempt(probe, one.address, one.port) for one in targets if one))
        facts = self._facts(service_id, name)
        if facts is not None and all(found.kind not in ("well", "ours") for found in findings):
            setattr(facts, fact, True)
            self._learn(service_id, "silence" if fact == "is_silent" else "process", at)

    def _facts(self, service_id: str, name: str) -> Facts | None:
        service = self.services.get(service_id)
        return service.health.facts.get(name) if service else None

    def _background(self, work: Awaitable[None]) -> None:
        async def careful() -> None:
            try:
                await work
            except (AgentError, OSError) as error:
                logger.warning("a load balancer's flows: %s", error)

        task = asyncio.create_task(careful())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _note(facts: Facts, family: Family, verdict: Verdict) -> None:
    facts.probed[family], facts.probe_reason = verdict.is_up, verdict.last.reason
    if verdict.is_refused != (family in facts.refused):  # a set of its own for each backend would be a kilobyte a service
        facts.refused ^= {family}


def _enter(index: dict[_Key, tuple[_Value, ...]], key: _Key, value: _Value) -> None:
    """Tuples, as nearly all hold one: a set takes four times as much, and there are thousands."""
    if value not in index.get(key, ()):
        index[key] = (*index.get(key, ()), value)


def _leave(index: dict[_Key, tuple[_Value, ...]], key: _Key, value: _Value) -> None:
    left = tuple(one for one in index.get(key, ()) if one != value)
    if left:
        index[key] = left
    else:
        index.pop(key, None)
