"""The steps of a long command and their seconds: a live list on a terminal, plain lines elsewhere, JSON at the end.

The one rule: words go to standard error, data (the JSON) to standard output.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

State = Literal["running", "done", "failed", "interrupted"]
_MARKS: dict[State, tuple[str, str]] = {
    "done": ("✓", "green"),
    "failed": ("✗", "red"),
    "interrupted": ("–", "yellow"),
    "running": ("…", "cyan"),
}


@dataclass(slots=True)
class Step:
    """One step. `detail` is what a person wants to see of it; it may change while it runs."""

    name: str
    began: float
    state: State = "running"
    seconds: float = 0
    detail: str = ""

    def note(self, detail: str) -> None:
        self.detail = detail

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began if self.state == "running" else self.seconds


class Timeline:
    """Steps in the order they began; several may run at a time."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._began = time.monotonic()
        self._console = Console(stderr=True, highlight=False)
        self._live: Live | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the steps live while the block runs, where there is a terminal."""
        if not self._console.is_terminal or os.environ.get("TERM") == "dumb":
            yield
            return
        with Live(get_renderable=self._table, console=self._console, refresh_per_second=8, transient=False) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        step = Step(name=name, began=time.monotonic())
        self.steps.append(step)
        self._line(f"{self.seconds:7.1f} s  … {name}")
        try:
            yield step
        except Exception as error:
            self._end(step, "failed")
            step.detail = step.detail or str(error).split("\n", 1)[0]
            self._line(f"{self.seconds:7.1f} s  ✗ {name}: {error}")
            raise
        except BaseException:
            self._end(step, "interrupted")
            raise
        self._end(step, "done")
        self._line(f"{self.seconds:7.1f} s  ✓ {name} ({step.seconds:.1f} s){': ' if step.detail else ''}{step.detail}")

    def _end(self, step: Step, state: State) -> None:
        step.seconds = step.elapsed
        step.state = state

    def say(self, words: str) -> None:
        """A line between the steps."""
        if self._live is not None:
            self._live.console.print(Text(words))
        else:
            print(words, file=sys.stderr, flush=True)

    def _line(self, words: str) -> None:
        if self._live is None:
            print(words, file=sys.stderr, flush=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(width=1)
        table.add_column(no_wrap=True, min_width=max((len(step.name) for step in self.steps), default=1))
        table.add_column(justify="right", no_wrap=True, min_width=8)
        table.add_column(overflow="ellipsis", no_wrap=True, style="dim", ratio=1)
        for step in self.steps:
            mark, colour = _MARKS[step.state]
            first = Spinner("dots", style=colour) if step.state == "running" else Text(mark, style=colour)
            table.add_row(first, step.name, f"{step.elapsed:.1f} s", step.detail)
        return table

    def summary(self) -> list[dict[str, object]]:
        """The steps as data, in seconds since the timeline began."""
        return [
            {
                "name": step.name,
                "state": step.state,
                "began": round(step.began - self._began, 3),
                "seconds": round(step.elapsed, 3),
                "detail": step.detail,
            }
            for step in self.steps
        ]

    def print_table(self) -> None:
        """The whole list once more, at the end of plain output."""
        width = max((len(step.name) for step in self.steps), default=0)
        for step in self.steps:
            print(f"  {_MARKS[step.state][0]} {step.name:<{width}}  {step.elapsed:7.1f} s  {step.detail}", file=sys.stderr)
        print(f"    {'in all':<{width}}  {self.seconds:7.1f} s", file=sys.stderr, flush=True)
