"""The benchmark runs, and prints what people and programs rely on."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest


@pytest.mark.slow
async def test_quick_run_prints_the_known_metrics() -> None:
    argv = [sys.executable, "-m", "tests.bench.gateway", "--json", "--quick"]
    child = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    printed, _ = await child.communicate()
    assert child.returncode == 0
    result = json.loads(printed)
    assert result["name"] == "gateway"
    found = {row["metric"]: row["ours"] for row in result["rows"]}
    assert {"cpu_us_per_request", "cpu_us_per_paced_chunk", "added_p50_ms", "added_p99_ms", "rss_mib"} <= set(found)
    assert found["rss_mib"] < 120
