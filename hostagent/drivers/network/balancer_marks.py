"""The numbers by which flows remember their backend: one mark for each (service, target port, backend) of this host.

The one rule: a mark is on disk before a packet carries it, and one that was given up is the last to be given out again. Flows
outlive the agent; with other numbers after a restart, the end of one backend would take the flows of another.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from hostagent.lib import files
from hostagent.protocol.errors import AgentError

LAST_MARK = 0xFFFF
MarkKey = tuple[str, int, str]


class BackendMarks:
    """`path` is read once. Raises AgentError `loadbalancer.marks_exhausted`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._marks: dict[MarkKey, int] = {}
        self._last = 0
        self._load()

    def of(self, service_id: str) -> dict[tuple[int, str], int]:
        return {(port, backend): mark for (owner, port, backend), mark in self._marks.items() if owner == service_id}

    def want(self, service_id: str, keys: Iterable[tuple[int, str]]) -> tuple[dict[tuple[int, str], int], tuple[int, ...]]:
        """(the marks of these and no others, those that were given up)."""
        present = self.of(service_id)
        wanted = set(keys)
        gone = {key: mark for key, mark in present.items() if key not in wanted}
        for key in gone:
            del self._marks[service_id, *key]
        fresh = sorted(wanted - present.keys())
        taken = set(self._marks.values()) if fresh else set()
        for key in fresh:
            mark = self._next(taken)
            taken.add(mark)
            self._marks[service_id, *key] = mark
        if gone or fresh:
            self._save()
        return {key: mark for key, mark in (present | self.of(service_id)).items() if key in wanted}, tuple(gone.values())

    def _next(self, taken: set[int]) -> int:
        for _ in range(LAST_MARK):
            self._last = self._last % LAST_MARK + 1
            if self._last not in taken:
                return self._last
        raise AgentError("loadbalancer.marks_exhausted", f"this host balances {LAST_MARK} backends already", retryable=False)

    def _load(self) -> None:
        try:
            content = json.loads(self._path.read_bytes())
            self._marks = {(owner, port, backend): mark for owner, port, backend, mark in content["marks"]}
            self._last = content["last"]
        except (OSError, ValueError, KeyError, TypeError):
            self._marks, self._last = {}, 0

    def _save(self) -> None:
        content = {"last": self._last, "marks": [[*key, mark] for key, mark in self._marks.items()]}
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.write_atomically(self._path, json.dumps(content).encode())
