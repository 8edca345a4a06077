"""What a balancer must know again after a restart of the agent: the numbers by which flows remember their backend, and since
when backends are draining or ejected.

The one rule: a mark is on disk before a packet carries it. Flows outlive the agent; with other numbers after a restart the end
of one backend would take the flows of another. A mark that was given up is the last to be given out again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hostagent.lib import files
from hostagent.protocol.errors import AgentError

LAST_MARK = 0xFFFF
MarkKey = tuple[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """Of one service: `marks` by (target port, backend), `away` in wall-clock seconds by backend, with the state's word."""

    marks: dict[MarkKey, int] = field(default_factory=dict)
    away: dict[str, tuple[str, float]] = field(default_factory=dict)


class BalancerMemory:
    """One file a service in `directory`, read at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._services: dict[str, Remembered] = {}
        self._taken: set[int] = set()
        self._last = 0
        for path in sorted(directory.glob("*.json")):
            try:
                content = json.loads(path.read_bytes())
                marks = {(port, backend): mark for port, backend, mark in content["marks"]}
                away = {backend: (word, at) for backend, (word, at) in content["away"].items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
            self._services[path.stem] = Remembered(marks=marks, away=away)
            self._taken |= set(marks.values())

    def remember(
        self, service_id: str, keys: Iterable[MarkKey], states: Mapping[str, str]
    ) -> tuple[Remembered, tuple[int, ...]]:
        """(marks of exactly these keys and since when these backends are in these states, the marks given up).

        Raises AgentError `loadbalancer.marks_exhausted`.
        """
        before, now, wanted = self._services.get(service_id, Remembered()), time.time(), set(keys)
        kept = {key: mark for key, mark in before.marks.items() if key in wanted}
        gone = tuple(mark for key, mark in before.marks.items() if key not in wanted)
        fresh = self._free(len(wanted) - len(kept))
        marks = kept | dict(zip(sorted(wanted - kept.keys()), fresh, strict=True))
        away = {
            name: before.away[name] if before.away.get(name, ("",))[0] == state else (state, now)
            for name, state in states.items()
        }
        after = Remembered(marks=marks, away=away)
        if after != before:
            content = {"marks": [[*key, mark] for key, mark in marks.items()], "away": away}
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            files.write_atomically(self._directory / f"{service_id}.json", json.dumps(content).encode())
            self._taken = (self._taken - set(gone)) | set(fresh)
            self._services[service_id] = after
        return after, gone

    def forget(self, service_id: str) -> tuple[int, ...]:
        """The marks given up."""
        gone = tuple(self._services.pop(service_id, Remembered()).marks.values())
        self._taken -= set(gone)
        if self._directory.is_dir():
            files.remove(self._directory / f"{service_id}.json")
        return gone

    def _free(self, count: int) -> list[int]:
        if len(self._taken) + count > LAST_MARK:
            raise AgentError(
                "loadbalancer.marks_exhausted", f"this host balances {LAST_MARK} backends already", retryable=False
            )
        found: list[int] = []
        while len(found) < count:
            self._last = self._last % LAST_MARK + 1
            if self._last not in self._taken:
                found.append(self._last)
        return found
