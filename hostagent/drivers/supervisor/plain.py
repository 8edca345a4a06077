"""The plain supervisor as a driver: a client of the daemon in `init.py`.

The one rule: one connection a question, each with a deadline; the daemon may be restarted between any two.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

from hostagent.drivers.supervisor.protocol import SupervisorTraits, UnitObserved, UnitRendered, UnitWanted
from hostagent.drivers.supervisor.wire import observed_from_json, unit_to_json
from hostagent.protocol.errors import AgentError

ANSWER_SECONDS = 10.0
KILL_MARGIN_SECONDS = 20.0
LONGEST_GRACE_SECONDS = 600.0
MAX_LINE_BYTES = 1 << 20


class PlainSupervisor:
    """`run` is the daemon's run directory."""

    traits = SupervisorTraits(name="plain", limits=frozenset({"cpuset"}))

    def __init__(self, run: Path) -> None:
        self.socket_path = run / "supervisor.sock"

    def render(self, wanted: UnitWanted) -> UnitRendered:
        line = json.dumps({"op": "apply", "unit": unit_to_json(wanted)}, separators=(",", ":"))
        return UnitRendered(argv=(), stdin=line.encode() + b"\n")

    async def observe(self, name: str) -> UnitObserved | None:
        unit = (await self._ask({"op": "observe", "name": name}))["unit"]
        return observed_from_json(unit) if unit else None

    async def apply(self, wanted: UnitWanted) -> UnitObserved:
        return observed_from_json((await self._ask({"op": "apply", "unit": unit_to_json(wanted)}))["unit"])

    async def remove(self, name: str) -> None:
        await self._ask({"op": "remove", "name": name}, seconds=LONGEST_GRACE_SECONDS + KILL_MARGIN_SECONDS)

    async def names(self) -> tuple[str, ...]:
        return tuple((await self._ask({"op": "names"}))["names"])

    async def _ask(self, request: dict[str, Any], *, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        try:
            async with asyncio.timeout(seconds):
                answer = await self._exchange(json.dumps(request, separators=(",", ":")).encode() + b"\n")
        except (OSError, ValueError, TimeoutError) as error:
            raise AgentError(
                "supervisor.unreachable", f"the supervisor at {self.socket_path} does not answer: {error!r}"
            ) from error
        if not answer["ok"]:
            if answer["code"] == "supervisor.stop_failed":
                raise AgentError("supervisor.stop_failed", answer["message"])
            retryable = answer["code"] == "supervisor.start_failed"
            raise AgentError("supervisor.start_failed", answer["message"], retryable=retryable)
        return answer

    async def _exchange(self, line: bytes) -> dict[str, Any]:
        reader, writer = await asyncio.open_unix_connection(self.socket_path, limit=MAX_LINE_BYTES)
        try:
            writer.write(line)
            await writer.drain()
            answer = await reader.readline()
            if not answer:
                raise ConnectionResetError("closed without an answer")
            return json.loads(answer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
