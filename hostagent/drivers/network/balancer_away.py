"""Since when backends are draining or ejected. The one rule: on disk, so that an agent that starts again resets no deadline."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from hostagent.lib import files


class AwayTimes:
    """In wall-clock seconds, by service, backend and state."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._since: dict[str, dict[str, tuple[str, float]]] = {}
        try:
            content = json.loads(path.read_bytes())
            self._since = {s: {b: (word, at) for b, (word, at) in away.items()} for s, away in content.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            self._since = {}

    def keep(self, service_id: str, states: Mapping[str, str]) -> dict[str, float]:
        """Since when each of these backends is in its state; those not named are forgotten."""
        before, now = self._since.get(service_id, {}), time.time()
        after = {name: before[name] if before.get(name, ("",))[0] == state else (state, now) for name, state in states.items()}
        if after != before:
            self._since[service_id] = after
            if not after:
                del self._since[service_id]
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            files.write_atomically(self._path, json.dumps(self._since).encode())
        return {name: at for name, (_, at) in after.items()}
