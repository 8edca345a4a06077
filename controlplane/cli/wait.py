"""Waiting for an operation, with its steps as they happen.

The one rule: waiting changes nothing; interrupted, it says how to go on.
"""

from __future__ import annotations

import re
import sys
import time
from datetime import UTC, datetime
from typing import Any

from controlplane.cli.client import Client
from controlplane.cli.errors import CommandFailed, Exit, exit_code_of
from controlplane.cli.output import say

DEFAULT_TIMEOUT = "30m"
_DURATION = re.compile(r"(\d+)(s|m|h)")
_POLL_SECONDS = 20
_POLL_ON_TERMINAL_SECONDS = 1
_PATIENCE_SECONDS = 2  # so long nobody asks why it is not done yet


def seconds_of(text: str) -> float:
    """`90s`, `30m` or `2h` in seconds; raises CommandFailed."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise CommandFailed(f"{text!r} is not a time", why="write 90s, 30m or 2h", exit_code=Exit.USAGE)
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


MARKS = {"done": "✓", "failed": "✗", "cut": "–", "running": "…"}


def step_line(step: dict[str, Any]) -> str:
    """A step: how it ended, its name, its seconds (until now for the present one), and what it met."""
    until = datetime.fromisoformat(step["finished_at"]) if step["finished_at"] else datetime.now(UTC)
    seconds = max((until - datetime.fromisoformat(step["started_at"])).total_seconds(), 0.0)
    tries = f"  try {step['attempt']}: {step['error_code'] or step['error'] or ''}" if step["attempt"] > 1 else ""
    return f"  {MARKS[step['state']]} {step['name']:<14} {seconds:6.1f} s{tries}"


class StepList:
    """The live list: a line for each step that was left; on a terminal the present one counts its seconds."""

    def __init__(self) -> None:
        self._is_live = sys.stderr.isatty()
        self._told = 0
        self._step, self._since, self._told_error = "", time.monotonic(), ""

    def show(self, steps: list[dict[str, Any]]) -> None:
        """Take in what the operation says now."""
        left = [step for step in steps if step["finished_at"] is not None]
        for step in left[self._told :]:
            self._line(step_line(step))
        self._told = max(self._told, len(left))
        if steps[len(left) :]:
            self._present(steps[-1])

    def note(self, sentence: str) -> None:
        """A line between the steps."""
        step, since, told = self._step, self._since, self._told_error
        self._line(f"    {sentence}")
        self._step, self._since, self._told_error = step, since, told

    def end(self) -> None:
        """Nothing is under way any more."""
        self._line("")

    def _line(self, line: str) -> None:
        if self._is_live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        if line:
            say(line)
        self._step = ""

    def _present(self, step: dict[str, Any]) -> None:
        if step["name"] != self._step:
            self._step, self._since, self._told_error = step["name"], time.monotonic(), ""
            if not self._is_live:
                say(f"  {self._step} …")
        error = (step.get("error") or "") if step["attempt"] > 1 else ""
        if self._is_live:
            words = f"  {self._step} … {time.monotonic() - self._since:.0f} s"
            tries = f" (try {step['attempt']}: {error})" if error else ""
            print(f"\r\033[K{(words + tries)[:120]}", end="", file=sys.stderr, flush=True)
        elif error and error != self._told_error:
            say(f"  {self._step}: try {step['attempt']}: {error}")
        self._told_error = error


class Hindrances:
    """What the thing itself says is not so: each statement is told once while waiting, and all that still hold at the end."""

    def __init__(self, client: Client, path: str) -> None:
        self._client, self._path = client, path
        self._told: set[str] = set()

    def look(self) -> list[str]:
        """Each as `reason: sentence`; none when the thing is gone or has no conditions."""
        if not self._path:
            return []
        try:
            conditions = self._client.get(self._path).get("conditions") or []
        except CommandFailed:
            return []
        return [_sentence(condition) for condition in conditions if condition["status"] == "false"]

    def tell(self, steps: StepList) -> None:
        for sentence in self.look():
            if sentence not in self._told:
                self._told.add(sentence)
                steps.note(sentence)


def _sentence(condition: dict[str, Any]) -> str:
    return f"{condition['reason'] or condition['type']}: {condition['message']}".rstrip(": ")


def wait_for(
    client: Client, operation_id: str | None, *, timeout: str = DEFAULT_TIMEOUT, path: str = ""
) -> dict[str, Any] | None:
    """Return the operation when it has succeeded; None when there is none. Raises CommandFailed for every other end.

    `path`: where the API shows the thing, whose false conditions are told meanwhile.
    """
    if operation_id is None:
        return None
    began = time.monotonic()
    ends_at = began + seconds_of(timeout)
    steps, seen, wait = StepList(), "", "0ms"  # the first look answers at once
    hindrances = Hindrances(client, path)
    poll = _POLL_ON_TERMINAL_SECONDS if sys.stderr.isatty() else _POLL_SECONDS
    try:
        while True:
            operation = client.get(f"/v1/operations/{operation_id}", wait=wait, seen=seen)
            steps.show(operation["steps"])
            seen = operation["steps"][-1]["name"] if operation["steps"] else seen
            if operation["state"] != "running":
                return _ended(operation, steps)
            left = ends_at - time.monotonic()
            if left <= 0:
                raise _timed_out(operation_id, timeout, hindrances.look())
            is_slow = time.monotonic() - began >= _PATIENCE_SECONDS
            if is_slow:
                hindrances.tell(steps)
            longest = poll if is_slow else min(poll, _PATIENCE_SECONDS)
            wait = f"{max(1, int(min(longest, left) * 1000))}ms"
    except KeyboardInterrupt:
        say(f"\nIt goes on without you: bedplate operation wait {operation_id}")
        raise


def _ended(operation: dict[str, Any], steps: StepList) -> dict[str, Any]:
    state = operation["state"]
    steps.end()
    if state == "succeeded":
        return operation
    if state == "superseded":
        raise CommandFailed(
            f"{operation['action']} was superseded by a later change", exit_code=Exit.CONFLICT, code="operation.superseded"
        )
    code = operation["error_code"] or ""
    raise CommandFailed(
        f"{operation['action']} failed",
        why=operation["error_detail"] or "",
        hint="bedplate incident list",
        code=code,
        exit_code=exit_code_of(code),
    )


def _timed_out(operation_id: str, timeout: str, hindrances: list[str]) -> CommandFailed:
    return CommandFailed(
        f"not done within {timeout}",
        why="; ".join(hindrances),
        hint=f"bedplate operation wait {operation_id}",
        exit_code=Exit.TIMED_OUT,
    )
