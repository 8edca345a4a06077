"""`bedplate bench` against an engine whose schedule is known."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.cli.load.drive import Plan, Target, drive
from controlplane.cli.load.judge import Objective, find_limit, limit_of, regressions
from controlplane.cli.load.report import page
from controlplane.cli.load.summary import percentile, summarise
from controlplane.cli.load.workload import Lengths, NotALength, Workload
from tests.api.gateway.mock_engine import DONE, MockEngine, delta, usage_event

ROOT = Path(__file__).resolve().parents[2]
TTFT, GAP, TOKENS = 0.08, 0.03, 8
WORKLOAD = Workload(model="m", prompt=Lengths.parse("32"), output=Lengths.parse("8"))


async def scheduled(seen, peer) -> None:
    """First token after 80 ms, seven more every 30 ms, on a clock that does not drift."""
    begin = asyncio.get_running_loop().time()
    await peer.open_stream()
    await peer.events(delta(role="assistant"))
    for number in range(TOKENS):
        await asyncio.sleep(max(0.0, begin + TTFT + number * GAP - asyncio.get_running_loop().time()))
        await peer.events(delta(reasoning="x") if number == 0 else delta("x"))
    await peer.events(usage_event({"prompt_tokens": 32, "completion_tokens": TOKENS, "total_tokens": 40}), DONE)
    await peer.end()


@pytest.fixture
async def engine() -> AsyncIterator[MockEngine]:
    engine = MockEngine()
    engine.answer = scheduled
    await engine.start()
    yield engine
    await engine.stop()


def target(engine: MockEngine) -> Target:
    return Target(url=f"{engine.url}/v1", key="secret")


async def test_times_are_those_of_the_schedule(engine: MockEngine) -> None:
    """A first token that is no content counts; decoding time leaves the first token out."""
    ran = await drive(target(engine), WORKLOAD, Plan(concurrency=2, requests=8, seconds=60))
    summary = summarise(ran)
    assert (summary["requests"], summary["errors"], summary["output_tokens"], summary["prompt_tokens"]) == (8, 0, 64, 256)
    assert TTFT * 1000 <= summary["ttft_ms"]["p50"] <= TTFT * 1000 + 40
    assert GAP * 1000 * 0.8 <= summary["tpot_ms"]["p50"] <= GAP * 1000 * 1.3
    assert summary["itl_ms"]["p50"] >= GAP * 1000 * 0.7
    assert {seen.headers["authorization"] for seen in engine.seen} == {"Bearer secret"}


async def test_an_open_loop_does_not_wait(engine: MockEngine) -> None:
    release = asyncio.Event()

    async def hold(seen, peer) -> None:
        await release.wait()
        await scheduled(seen, peer)

    engine.answer = hold
    task = asyncio.create_task(drive(target(engine), WORKLOAD, Plan(rate=200, seconds=60, requests=40)))
    async with asyncio.timeout(20):
        while len(engine.seen) < 40:
            await asyncio.sleep(0.02)
    release.set()
    assert len((await task).calls) == 40


async def test_faults_are_counted_by_kind(engine: MockEngine) -> None:
    answers = iter(["cut", "500", "truncated", "error"])

    async def bad(seen, peer) -> None:
        match next(answers):
            case "cut":
                peer.cut()
            case "500":
                await peer.json(500, {"error": {"message": "broken"}})
            case "truncated":
                await peer.open_stream()
                await peer.events(delta("x"))
                await peer.end()
            case _:
                await peer.open_stream()
                await peer.events(b'data: {"error":{"message":"stopped"}}\n\n')
                await peer.end()

    engine.answer = bad
    summary = summarise(await drive(target(engine), WORKLOAD, Plan(concurrency=1, requests=4, seconds=60)))
    assert (summary["requests"], summary["errors"], summary["ttft_ms"]) == (4, 4, None)
    assert {"HTTP 500: broken", "the stream ended without [DONE]", "stopped"} <= set(summary["errors_by_kind"])


def test_the_same_seed_asks_the_same() -> None:
    def some(seed: int) -> list[bytes]:
        workload = Workload(
            model="m", prompt=Lengths.parse("uniform:20:60"), output=Lengths.parse("8"), shared_tokens=10, prefixes=2, seed=seed
        )
        bodies = workload.bodies()
        return [next(bodies) for _ in range(20)]

    assert some(1) == some(1)
    assert some(1) != some(2)
    beginnings = {" ".join(json.loads(body)["messages"][0]["content"].split()[:10]) for body in some(1)}
    assert len(beginnings) == 2
    lengths = [len(json.loads(body)["messages"][0]["content"].split()) for body in some(1)]
    assert 20 <= min(lengths) <= max(lengths) <= 60


@pytest.mark.parametrize("text", ["0", "x", "uniform:9:1", "normal:10", "poisson:1:2", "", "uniform:1:2:3"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(NotALength):
        Lengths.parse(text)


def test_lengths_have_their_mean() -> None:
    dice = random.Random(1)
    for text in ("100", "uniform:50:150", "normal:100:10", "lognormal:100:50"):
        drawn = [Lengths.parse(text).draw(dice) for _ in range(4000)]
        assert 95 < sum(drawn) / len(drawn) < 105


def test_percentiles() -> None:
    assert percentile([1.0], 99) == 1.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([float(n) for n in range(101)], 95) == 95


def summary_at(rate: float, capacity: float = 23.0) -> dict:
    slow = 100 if rate <= capacity else 5000
    times = {"mean": slow, "p50": slow, "p90": slow, "p95": slow, "p99": slow}
    return {
        "requests": 10,
        "errors": 0,
        "requests_per_second": min(rate, capacity),
        "output_tokens_per_second": 1.0,
        **dict.fromkeys(("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"), times),
    }


async def test_the_limit_is_found() -> None:
    async def run(rate: float) -> dict:
        return summary_at(rate)

    tries = await find_limit(run, Objective(ttft_ms=500), first=1, most=1000)
    best = limit_of(tries)
    assert best is not None
    assert 23 * 0.95 <= best.rate <= 23
    assert len(tries) < 15
    assert limit_of(await find_limit(run, Objective(ttft_ms=50), first=1, most=1000)) is None
    capped = limit_of(await find_limit(run, Objective(ttft_ms=500), first=1, most=10))
    assert capped is not None
    assert capped.rate == 10


def test_regressions() -> None:
    before, after = summary_at(10), summary_at(10)
    assert regressions(before, after, tolerance=0.1) == []
    assert regressions(before, {**after, "errors": 1, "requests_per_second": 5.0}, tolerance=0.1) == [
        "errors 0 → 1",
        "requests_per_second 10.00 → 5.00",
    ]
    assert regressions(summary_at(10), summary_at(30), tolerance=0.1)[0].startswith("ttft_ms p50 100.0 → 5000.0")


async def test_the_page_carries_all_itself(engine: MockEngine) -> None:
    ran = await drive(target(engine), WORKLOAD, Plan(concurrency=2, requests=4, seconds=60))
    document = {"date": "now", "url": "http://<x>", "workload": WORKLOAD.described(), "summary": summarise(ran)}
    text = page("Load", document, ran.calls)
    assert text.count("<svg") == 4
    assert "http://&lt;x&gt;" in text
    assert not {"<script", "src=", "<link", "@import"} & set(text.split())


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "controlplane.cli.main", "bench", *arguments]
    return subprocess.run(
        argv, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


async def test_the_command_line(engine: MockEngine, tmp_path: Path) -> None:
    saved, html = tmp_path / "base.json", tmp_path / "page.html"
    url = f"{engine.url}/v1"
    common = ("--model", "m", "--url", url, "--requests", "4", "--concurrency", "4")
    loaded = await asyncio.to_thread(
        run, "load", *common, "--json", "--save", str(saved), "--html", str(html), BEDPLATE_BENCH_KEY="secret"
    )
    assert loaded.returncode == 0, loaded.stderr
    assert json.loads(loaded.stdout)["summary"]["requests"] == 4
    assert "secret" not in saved.read_text() + html.read_text() + loaded.stdout
    again = await asyncio.to_thread(run, "regress", "--baseline", str(saved), "--tolerance", "5", BEDPLATE_BENCH_KEY="secret")
    assert again.returncode == 0, again.stderr

    async def slow(seen, peer) -> None:
        await asyncio.sleep(1)
        await scheduled(seen, peer)

    engine.answer = slow
    worse = await asyncio.to_thread(run, "regress", "--baseline", str(saved), "--tolerance", "0.5")
    assert worse.returncode == 1
    assert "ttft_ms p50" in worse.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("load", "--model", "m", "--rate", "1", "--concurrency", "2"), 2, "exclude each other"),
        (("load", "--model", "m", "--prompt-tokens", "many"), 2, "a length is like"),
        (("load", "--model", "m", "--extra", "[1]"), 2, "no JSON object"),
        (("load", "--model", "m", "--url", "http://127.0.0.1:9/v1", "--requests", "1"), 1, "no request succeeded"),
        (("limit", "--model", "m", "--percent", "42"), 2, "--percent is one of"),
        (("regress", "--baseline", "/nowhere.json"), 2, "is no baseline"),
    ],
)
def test_what_people_get_wrong(arguments, code: int, words: str) -> None:
    ended = run(*arguments)
    assert (ended.returncode, words in ended.stderr) == (code, True), ended.stderr
