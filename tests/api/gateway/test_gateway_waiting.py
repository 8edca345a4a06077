"""The waiting room, and what a gateway says of its load."""

from __future__ import annotations

import asyncio
import json

from tests.api.gateway.mock_engine import MockEngine, delta, well_behaved
from tests.api.gateway.test_gateway_faults import CHAT, STREAM, error_of, post
from tests.api.gateway.test_gateway_routing import engines

AUTOSCALE = {"min_replicas": 0, "max_replicas": 2, "target_in_flight": 2, "idle_seconds": 60}


async def load(fleet, endpoint_id: str):
    async with fleet.connection() as connection:
        return await connection.fetchrow("SELECT * FROM endpoint_load WHERE endpoint_id = $1", endpoint_id)


async def until(condition, seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.02)


async def autoscaled(fleet, gateway, name: str, *urls: str, timeouts: dict | None = None, **columns: object) -> str:
    endpoint_id = await fleet.model(name, *urls, timeouts=timeouts)
    columns = {"autoscale": json.dumps(AUTOSCALE), **columns}
    for column, value in columns.items():
        await fleet.execute(f"UPDATE endpoint SET {column} = $2 WHERE id = $1", endpoint_id, value, topic="routes")
    await gateway.fresh()
    return endpoint_id


async def add_replica(fleet, endpoint_id: str, url: str) -> None:
    async with fleet.connection() as connection:
        await fleet._replica(connection, fleet.project_id, endpoint_id, url)
        await fleet.publish(connection, "routes")


async def test_requests_wait_for_a_replica_and_the_autoscaler_hears_of_it_at_once(gateway, fleet, http) -> None:
    endpoint_id = await autoscaled(fleet, gateway, "asleep")
    async with engines(1) as (engine,):
        calls = [asyncio.create_task(post(http, gateway, {**CHAT, "model": "asleep"})) for _ in range(5)]

        async def is_told() -> bool:
            row = await load(fleet, endpoint_id)
            return row is not None and row["queued"] > 0

        await until(is_told)
        assert gateway.app.means.router.room.count(endpoint_id) == 5
        await add_replica(fleet, endpoint_id, engine.url)
        answers = await asyncio.gather(*calls)
        assert [status for status, _, _ in answers] == [200] * 5
        assert all(int(headers["x-queue-ms"]) > 0 for _, headers, _ in answers)

    async def is_idle() -> bool:
        row = await load(fleet, endpoint_id)
        return row["queued"] == row["in_flight"] == 0 and row["last_end_at"] is not None

    await until(is_idle)


async def test_only_as_many_go_as_there_are_places(gateway, fleet, http) -> None:
    """Ten wait for an engine with a limit of two: it never has more, and they go in order."""
    endpoint_id = await autoscaled(fleet, gateway, "narrow", autoscale=None, max_in_flight=2)
    async with engines(1) as (engine,):
        busy, most = 0, 0

        async def counting(seen, peer) -> None:
            nonlocal busy, most
            busy += 1
            most = max(most, busy)
            await asyncio.sleep(0.02)
            busy -= 1
            await well_behaved(seen, peer)

        engine.answer = counting
        calls = []
        for number in range(10):
            headers = {**gateway.headers, "x-request-id": f"n{number}"}
            calls.append(asyncio.create_task(post(http, gateway, {**CHAT, "model": "narrow"}, headers=headers)))

            async def has_come(number=number) -> bool:
                return gateway.app.means.router.room.count(endpoint_id) == number + 1

            await until(has_come)
        await add_replica(fleet, endpoint_id, engine.url)
        assert [status for status, _, _ in await asyncio.gather(*calls)] == [200] * 10
        assert most == 2
        order = [int(seen.headers["x-request-id"][1:]) for seen in engine.seen]
        assert all(abs(place - number) <= 1 for place, number in enumerate(order))


async def test_a_full_room_and_a_wait_in_vain(gateway, fleet, http) -> None:
    endpoint_id = await autoscaled(fleet, gateway, "never", timeouts={"queue": 0.5})
    room = gateway.app.means.router.room
    room._most_requests = 2
    answers = await asyncio.gather(*(post(http, gateway, {**CHAT, "model": "never"}) for _ in range(3)))
    found = sorted((status, error_of(body)["code"]) for status, _, body in answers)
    assert found == [(429, "rate_limit_exceeded"), (503, "model_loading"), (503, "model_loading")]
    assert all(int(headers["retry-after"]) >= 1 for _, headers, _ in answers)
    assert room.count(endpoint_id) == 0
    assert room._bytes == 0


async def test_who_leaves_the_queue_leaves_it(gateway, fleet, http) -> None:
    endpoint_id = await autoscaled(fleet, gateway, "left")
    call = asyncio.create_task(post(http, gateway, {**CHAT, "model": "left"}))
    room = gateway.app.means.router.room

    async def waits() -> bool:
        return room.count(endpoint_id) == 1

    await until(waits)
    call.cancel()

    async def is_gone() -> bool:
        return room.count(endpoint_id) == 0

    await until(is_gone, 2)


async def test_a_stream_counts_for_its_whole_life(gateway, fleet, engine: MockEngine, http) -> None:
    endpoint_id = await autoscaled(fleet, gateway, "long", engine.url)
    release = asyncio.Event()

    async def hold(seen, peer) -> None:
        await peer.open_stream()
        await peer.events(delta("one"))
        await release.wait()
        peer.cut()

    engine.answer = hold
    async with http.post(f"{gateway.url}/v1/chat/completions", json={**STREAM, "model": "long"}, headers=gateway.headers):

        async def is_counted() -> bool:
            row = await load(fleet, endpoint_id)
            return row is not None and row["in_flight"] > 0.99 and row["requests_per_second"] == 0

        await until(is_counted)
        release.set()
