"""Two revisions of one endpoint behind one route: each is asked by its own name, in its share, and what they do is counted."""

from __future__ import annotations

import asyncio
import json

from controlplane.core.ids import Kind, new_id
from tests.api.gateway.talk import CHAT, STREAM, post
from tests.api.gateway.test_gateway_routing import answering, cutting, engines

NEXT = """
INSERT INTO endpoint_revision (endpoint_id, number, model, spec, vcpus, memory_bytes)
SELECT id, 2, 'two', $2, 1, 1 << 30 FROM endpoint WHERE id = $1
"""
REPLICA = """
INSERT INTO replica (id, project_id, endpoint_id, revision, state, base_url, ready_at)
SELECT $2, project_id, id, 2, 'ready', $3, now() FROM endpoint WHERE id = $1
"""
SHARE = "UPDATE endpoint SET revision = 2, model = 'two', rollout = $2 WHERE id = $1"


async def roll_out(fleet, endpoint_id: str, url: str | None, share: float | None) -> None:
    spec = json.dumps({"served_model_id": "served-two"})
    await fleet.execute(NEXT, endpoint_id, spec, topic="routes")
    if url is not None:
        await fleet.execute(REPLICA, endpoint_id, new_id(Kind.REPLICA), url, topic="routes")
    await give(fleet, endpoint_id, share)


async def give(fleet, endpoint_id: str, share: float | None) -> None:
    await fleet.execute(SHARE, endpoint_id, json.dumps({"share": share}), topic="routes")


def asked(engine) -> list[str]:
    return [json.loads(seen.body)["model"] for seen in engine.seen]


async def test_each_revision_by_its_own_name_in_its_share(gateway, fleet, http) -> None:
    async with engines(2) as (old, new):
        endpoint_id = await fleet.model("talk", old.url)
        await roll_out(fleet, endpoint_id, new.url, 20)
        await gateway.fresh()
        gateway.app.means.router.random.seed(7)
        for _ in range(100):
            status, _, _ = await post(http, gateway, {**CHAT, "model": "talk"})
            assert status == 200
        assert set(asked(old)) == {"served"}
        assert set(asked(new)) == {"served-two"}
        assert 8 <= len(new.seen) <= 34  # of 100 with a probability of 0.2; the seed makes it one number
        await give(fleet, endpoint_id, 0)
        await gateway.fresh()
        before = len(new.seen)
        for _ in range(20):
            await post(http, gateway, {**CHAT, "model": "talk"})
        assert len(new.seen) == before
    rows = await fleet.usage(count=120)
    assert {row["served_model"] for row in rows} == {"talk", "two"}


async def test_a_session_stays_with_its_revision(gateway, fleet, http) -> None:
    async with engines(2) as (old, new):
        endpoint_id = await fleet.model("talk", old.url)
        await fleet.route("talk", affinity={"kind": "session"})
        await roll_out(fleet, endpoint_id, new.url, 50)
        await gateway.fresh()
        for session in range(12):
            before = (len(old.seen), len(new.seen))
            for _ in range(4):
                await post(http, gateway, {**CHAT, "model": "talk"}, headers={**gateway.headers, "x-session-id": f"s{session}"})
            moved = (len(old.seen) - before[0], len(new.seen) - before[1])
            assert sorted(moved) == [0, 4]
        assert old.seen
        assert new.seen


async def test_failures_and_first_tokens_are_told_by_revision(gateway, fleet, http) -> None:
    """What the new one fails at, the old one answers: no client sees it, and the roll-out does."""
    async with engines(2) as (old, new):
        endpoint_id = await fleet.model("talk", old.url)
        await fleet.route("talk", retry={"max_attempts": 2, "backoff_ms": 1})
        await roll_out(fleet, endpoint_id, new.url, 100)
        await gateway.fresh()
        router = gateway.app.means.router
        for answer in (answering(503), cutting, cutting):  # busy says nothing against it
            new.answer = answer
            router.breakers.keep(frozenset())
            assert (await post(http, gateway, {**STREAM, "model": "talk"}))[0] == 200
        rows = {revision: seen for _, revision, seen in router.traffic.rows()}
        assert (rows[1].requests, rows[1].failures, sum(rows[1].ttft_counts)) == (3, 0, 3)
        assert (rows[2].requests, rows[2].failures, sum(rows[2].ttft_counts)) == (2, 2, 0)
        async with fleet.connection() as connection, asyncio.timeout(10):
            while not await connection.fetchval("SELECT failures FROM revision_traffic WHERE revision = 2"):
                await asyncio.sleep(0.1)
        await fleet.execute("UPDATE endpoint SET rollout = NULL WHERE id = $1", endpoint_id, topic="routes")
        await gateway.fresh()
        assert router.traffic.rows() == []


async def test_a_request_waits_while_the_only_replica_is_exchanged(gateway, fleet, http) -> None:
    async with engines(2) as (old, new):
        endpoint_id = await fleet.model("talk", old.url)
        await roll_out(fleet, endpoint_id, None, None)
        await fleet.execute("UPDATE replica SET state = 'unhealthy' WHERE endpoint_id = $1", endpoint_id, topic="routes")
        await gateway.fresh()
        waiting = asyncio.create_task(post(http, gateway, {**CHAT, "model": "talk"}))
        room = gateway.app.means.router.room
        async with asyncio.timeout(10):
            while not room.count(endpoint_id):
                await asyncio.sleep(0.01)
        await fleet.execute(REPLICA, endpoint_id, new_id(Kind.REPLICA), new.url, topic="routes")
        status, _, _ = await waiting
        assert status == 200
        assert asked(new) == ["served-two"]
