"""Where the time of a run went: the sum of every file's tests with their fixtures, slowest first.

The one rule: a fixture that several tests share counts for the file of the test that made it, or that was its last.
"""

from __future__ import annotations

from collections import Counter

import pytest

SHOWN = 40
SHORTEST_RUN_SECONDS = 60.0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration  # pyright: ignore[reportArgumentType]
    if seconds.total() < SHORTEST_RUN_SECONDS:
        return
    terminalreporter.write_line(f"seconds by file ({seconds.total():.0f} in all):")
    for name, took in seconds.most_common(SHOWN):
        terminalreporter.write_line(f"{took:7.1f}  {name}")
