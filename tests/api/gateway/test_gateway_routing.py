"""Where a request goes: other replicas before the first byte, fallbacks, breakers, budgets, rules, affinity."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json

import pytest

from tests.api.gateway.mock_engine import MockEngine, Seen, delta, well_behaved
from tests.api.gateway.talk import CHAT, STREAM, error_of, post


@contextlib.asynccontextmanager
async def engines(count: int):
    started = [MockEngine() for _ in range(count)]
    for engine in started:
        await engine.start()
    try:
        yield started
    finally:
        for engine in started:
            await engine.stop()


def answering(status: int, *headers: str):
    async def answer(seen, peer) -> None:
        await peer.json(status, {"error": {"message": "no", "type": "x", "param": None, "code": None}}, *headers)

    return answer


async def cutting(seen, peer) -> None:
    peer.cut()


async def cutting_in_the_stream(seen, peer) -> None:
    await peer.open_stream()
    peer.cut()


async def test_a_reset_before_the_first_byte_goes_to_another_replica(gateway, fleet, http) -> None:
    """Refused, reset or ended before the first byte: no client sees it, on plain calls and streams."""
    async with engines(2) as (bad, good):
        await fleet.model("two", bad.url, good.url)
        await gateway.fresh()
        for answer, body in ((cutting, CHAT), (cutting, STREAM), (cutting_in_the_stream, STREAM), (answering(503), CHAT)):
            bad.answer = answer
            for _ in range(4):
                status, _, _ = await post(http, gateway, {**body, "model": "two"})
                assert status == 200
            gateway.app.means.router.breakers.keep(frozenset())
    rows = await fleet.usage(count=16)
    assert {row["outcome"] for row in rows} == {"completed"}
    assert {row["completion_tokens"] for row in rows} == {3}
    assert max(row["attempts"] for row in rows) == 2


@pytest.mark.parametrize("backoff_ms", [0, 1500])
async def test_a_later_try_goes_to_no_replica_that_left_meanwhile(gateway, fleet, http, backoff_ms: int) -> None:
    """A request is older than what the gateway knows by then: the address of who left may be a stranger's."""
    async with engines(2) as pair:
        await fleet.model("two", *(engine.url for engine in pair))
        await fleet.route("two", retry={"max_attempts": 3, "backoff_ms": backoff_ms})
        await gateway.fresh()

        async def left_alone(seen, peer) -> None:
            """The other one goes while this one is asked; then this one fails, and is the only one that is left."""
            if not backoff_ms:
                await leave()
            await answering(503)(seen, peer)
            if backoff_ms:
                await leave()

        async def leave() -> None:
            others = [engine.url for engine in pair if not engine.seen]
            query = "UPDATE replica SET state = 'deleting', base_url = NULL, deleting_at = now() WHERE base_url = ANY($1)"
            await fleet.execute(query, others, topic="routes")
            await gateway.fresh()

        for engine in pair:
            engine.answer = left_alone
        status, _, _ = await post(http, gateway, {**CHAT, "model": "two"})
        assert status == 503
        assert sorted(bool(engine.seen) for engine in pair) == [False, True]


async def test_an_engines_failure_is_not_repeated_at_its_twins(gateway, fleet, http) -> None:
    """A generation that fails would fail again: 500 costs one engine's work, not three."""
    async with engines(2) as pair:
        for engine in pair:
            engine.answer = answering(500)
        await fleet.model("twins", *(engine.url for engine in pair))
        await gateway.fresh()
        status, headers, body = await post(http, gateway, {**CHAT, "model": "twins"})
        assert (status, error_of(body)["code"]) == (502, "upstream_error")
        assert headers["x-route-attempts"] == "1"
        assert sum(len(engine.seen) for engine in pair) == 1


@pytest.mark.parametrize("primary", ["fails", "busy", "absent", "nothing ready"])
async def test_fallback(gateway, fleet, http, primary: str) -> None:
    async with engines(2) as (first, second):
        first.answer = answering(500 if primary == "fails" else 503)
        url = "http://127.0.0.1:9" if primary == "absent" else first.url
        main = await fleet.model("main", *([] if primary == "nothing ready" else [url]))
        await fleet.fall_back(main, await fleet.model("spare", second.url))
        await gateway.fresh()
        status, headers, _ = await post(http, gateway, {**CHAT, "model": "main"})
        assert status == 200
        assert headers["x-route-attempts"] == ("1" if primary == "nothing ready" else "2")
        assert second.seen[-1].headers["x-bedplate-route"].startswith("main/e-")


async def test_retry_policy_tries_a_single_replica_again(gateway, fleet, engine, http) -> None:
    await fleet.route("chat", retry={"max_attempts": 3, "backoff_ms": 50})
    await gateway.fresh()
    left = [2]

    async def flaky(seen, peer) -> None:
        left[0] -= 1
        await (answering(503) if left[0] >= 0 else well_behaved)(seen, peer)

    engine.answer = flaky
    status, headers, _ = await post(http, gateway)
    assert (status, headers["x-route-attempts"]) == (200, "3")
    left[0] = 9
    status, headers, _ = await post(http, gateway)
    assert (status, headers["x-route-attempts"]) == (503, "3")


async def test_retries_end_with_their_budget(gateway, fleet, http) -> None:
    """Two replicas that always reset: a storm of requests does not become two storms."""
    async with engines(2) as pair:
        for engine in pair:
            engine.answer = cutting
        await fleet.model("down", *(engine.url for engine in pair))
        await gateway.fresh()
        for _ in range(50):
            assert (await post(http, gateway, {**CHAT, "model": "down"}))[0] == 502
        assert sum(len(engine.seen) for engine in pair) <= 50 + 10 + 50 * 0.2 + 1


async def test_a_breaker_steers_away_and_comes_back(gateway, fleet, http, monkeypatch) -> None:
    monkeypatch.setattr("controlplane.gateway.breaker.FIRST_OPEN_SECONDS", 2.0)
    async with engines(2) as (bad, good):
        bad.answer = cutting
        await fleet.model("pair", bad.url, good.url)
        await gateway.fresh()
        for _ in range(20):
            assert (await post(http, gateway, {**CHAT, "model": "pair"}))[0] == 200
        assert len(bad.seen) == 3
        bad.answer = well_behaved
        async with asyncio.timeout(20):
            while len(bad.seen) < 6:
                assert (await post(http, gateway, {**CHAT, "model": "pair"}))[0] == 200


async def test_what_clients_do_wrong_opens_no_breaker(gateway, engine, http) -> None:
    for status in (400, 422, 429):
        engine.answer = answering(status, "retry-after: 7")
        for _ in range(5):
            assert (await post(http, gateway))[0] == status
    engine.answer = answering(500)
    for _ in range(9):
        assert (await post(http, gateway))[0] == 502
    engine.answer = well_behaved
    assert (await post(http, gateway))[0] == 200  # the only replica is tried, breaker or not


async def test_one_hung_engine_does_not_hold_the_others(gateway, fleet, http) -> None:
    async with engines(2) as (hung, good):
        release = asyncio.Event()

        async def hang(seen, peer) -> None:
            await release.wait()

        hung.answer = hang
        await fleet.model("half", hung.url, good.url, timeouts={"first_token": 0.2})
        await gateway.fresh()
        answers = [(await post(http, gateway, {**STREAM, "model": "half"}))[0] for _ in range(30)]
        release.set()
        assert answers.count(504) == len(hung.seen) <= 4


async def test_rules(gateway, fleet, engine, http) -> None:
    async with engines(1) as (special,):
        endpoint = await fleet.model("special", special.url)
        rules = {
            "labelled": {"key_labels": {"team": "search"}},
            "long": {"min_prompt_tokens": 500},
            "streams": {"stream": True, "headers": {"x-tier": "gold"}, "modalities": ["chat"]},
        }
        for name in rules:
            await fleet.execute(
                "INSERT INTO route_rule_target (route_id, rule, endpoint_id) SELECT id, $1, $2 FROM route WHERE name = 'chat'",
                name,
                endpoint,
                topic="routes",
            )
        await fleet.route("chat", rules=[{"name": name, "match": match} for name, match in rules.items()])
        labelled = await fleet.key(labels=json.dumps({"team": "search"}))
        await gateway.fresh()
        gold = {**gateway.headers, "x-tier": "gold"}

        async def rule(body=CHAT, headers=None) -> str:
            answer = await post(http, gateway, body, headers=headers)
            assert answer[0] == 200
            return answer[1]["x-bedplate-route"].split("/")[-1]

        assert await rule() == "default"
        assert await rule(headers={"authorization": f"Bearer {labelled}"}) == "labelled"
        assert await rule({**CHAT, "messages": [{"role": "user", "content": "x" * 4000}]}) == "long"
        assert await rule(headers=gold) == "default"
        assert await rule(STREAM, gold) == "streams"
        assert len(special.seen) == 3


def _replicas(seen: list[list[Seen]]) -> list[int]:
    return [len(one) for one in seen]


async def test_affinity_keeps_prompts_that_begin_alike_together(gateway, fleet, http) -> None:
    async with engines(3) as three:
        await fleet.model("affine", *(engine.url for engine in three))
        await fleet.route("affine", affinity={"kind": "prefix"})
        await gateway.fresh()
        for number in range(12):
            system = {"role": "system", "content": f"project {number % 4} " + "x" * 3000}
            for turn in range(3):
                messages = [system, {"role": "user", "content": f"turn {turn}"}]
                assert (await post(http, gateway, {**CHAT, "model": "affine", "messages": messages}))[0] == 200
        homes = collections.defaultdict(set)
        for index, engine in enumerate(three):
            for seen in engine.seen:
                homes[seen.json["messages"][0]["content"][:10]].add(index)
        assert {len(places) for places in homes.values()} == {1}
        await fleet.route("affine", affinity={"kind": "session", "header": "x-session-id"})
        await gateway.fresh()
        before = _replicas([engine.seen for engine in three])
        for _ in range(8):
            assert (await post(http, gateway, {**CHAT, "model": "affine"}, headers={**gateway.headers, "x-session-id": "s"}))[
                0
            ] == 200
        after = _replicas([engine.seen for engine in three])
        assert sorted(new - old for new, old in zip(after, before, strict=True)) == [0, 0, 8]


async def test_affinity_yields_to_load(gateway, fleet, http) -> None:
    """A session's replica that is over the bound is passed by."""
    async with engines(2) as pair:
        release = asyncio.Event()

        async def hold(seen, peer) -> None:
            await peer.open_stream()
            await peer.events(delta("one"))
            await release.wait()
            peer.cut()

        for engine in pair:
            engine.answer = hold
        await fleet.model("bound", *(engine.url for engine in pair))
        await fleet.route("bound", affinity={"kind": "session", "header": "x-session-id"})
        await gateway.fresh()
        headers = {**gateway.headers, "x-session-id": "s"}
        replies = [
            await http.post(f"{gateway.url}/v1/chat/completions", json={**STREAM, "model": "bound"}, headers=headers)
            for _ in range(8)
        ]
        assert min(len(engine.seen) for engine in pair) >= 2
        release.set()
        for reply in replies:
            reply.close()
