"""Budgets in tokens and money: chunks from the database, refusals without a retry, what metering settles, the database away."""

from __future__ import annotations

import asyncio
import json

import pytest

from controlplane.core.ids import Kind, new_id
from controlplane.gateway.budget import Budgets
from controlplane.gateway.directory import Budget, KeyEntry
from controlplane.gateway.problem import Problem
from tests.api.gateway.mock_engine import DONE, delta, usage_event
from tests.api.gateway.talk import CHAT, STREAM, error_of, post

SMALL = {**CHAT, "max_tokens": 5}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def use_of(fleet) -> tuple[int, int]:
    async with fleet.connection() as connection:
        row = await connection.fetchrow("SELECT sum(tokens)::bigint AS t, sum(money_micros)::bigint AS m FROM budget_use")
        return row["t"] or 0, row["m"] or 0


async def test_tokens_until_they_are_spent(gateway, fleet, http) -> None:
    """Ten tokens an answer: a hundred do for some, then clients are told not to try again; an event tells each limit once."""
    key = await fleet.key(token_budget=100, token_budget_soft=50)
    answers = [await post(http, gateway, SMALL, headers=bearer(key)) for _ in range(12)]
    statuses = [status for status, _, _ in answers]
    good = statuses.count(200)
    assert statuses == [200] * good + [429] * (12 - good)
    assert 7 <= good <= 10
    _, headers, body = answers[-1]
    assert error_of(body)["type"] == error_of(body)["code"] == "insufficient_quota"
    assert headers["x-should-retry"] == "false"
    assert "retry-after" not in headers
    assert len(await fleet.usage(count=good)) == good
    assert await use_of(fleet) == (10 * good, 0)
    async with fleet.connection() as connection:
        kinds = [row["kind"] for row in await connection.fetch("SELECT kind FROM event WHERE subject_kind = 'key'")]
        assert kinds == ["key.budget_soft_limit"], "the hard one is not reached while the rest does not do for a request"
        held = await connection.fetchval("SELECT sum(tokens) FROM budget_hold")
    assert 10 * good + held <= 100
    await fleet.execute("UPDATE key SET token_budget = 1000", topic="keys")
    await gateway.fresh()
    status, headers, _ = await post(http, gateway, SMALL, headers=bearer(key))
    assert (status, headers["x-bedplate-budget"]) == (200, "soft")


async def test_money_by_the_price_book(gateway, fleet, http) -> None:
    """7 prompt and 3 answer tokens at 1 and 2 a token: 13 each, and no more than 40 goes."""
    async with fleet.connection() as connection:
        await connection.execute(
            "INSERT INTO price (id, name, model, valid_from, prompt, completion, request)"
            " VALUES ($1, 'chat', 'chat', '2020-01-01', 1000000, 2000000, 0), ($2, 'late', 'chat', '2999-01-01', 9, 9, 9)",
            new_id(Kind.PRICE),
            new_id(Kind.PRICE),
        )
    await fleet.execute("SELECT 1", topic="routes")
    await gateway.fresh()
    key = await fleet.key(money_budget_micros=60)
    body = {"model": "chat", "messages": [{"content": "x"}], "max_tokens": 3}
    statuses = [(await post(http, gateway, body, headers=bearer(key)))[0] for _ in range(5)]
    assert statuses[:2] == [200, 200]
    assert statuses[-1] == 429
    records = await fleet.usage(count=statuses.count(200))
    assert {(record["cost_micros"], record["served_model"]) for record in records} == {(13, "chat")}
    assert await use_of(fleet) == (10 * len(records), 13 * len(records))
    async with fleet.connection() as connection:
        assert await connection.fetchval("SELECT sum(cost_micros) FROM usage_hour") == 13 * len(records)


async def test_what_is_not_billed_costs_nothing(gateway, fleet, engine, http) -> None:
    """Refused by the engine, dead in the middle, refused by a limit: the budget is whole again."""
    key = await fleet.key(token_budget=60, requests_per_minute=4)

    async def refuse(seen, peer) -> None:
        await peer.json(400, {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": None}})

    async def die(seen, peer) -> None:
        await peer.open_stream()
        await peer.events(delta("x"))
        await asyncio.sleep(0.05)
        peer.cut()

    async def whole(seen, peer) -> None:
        await peer.open_stream()
        await peer.events(delta("x"), usage_event({"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}), DONE)
        await peer.end()

    body = {**STREAM, "max_tokens": 20}
    for answer in (refuse, die, whole, whole):
        engine.answer = answer
        assert (await post(http, gateway, body, headers=bearer(key)))[0] in (200, 400)
    _, _, answered = await post(http, gateway, body, headers=bearer(key))
    assert error_of(answered)["code"] == "rate_limit_exceeded"
    await fleet.usage(count=4)
    assert await use_of(fleet) == (4, 0)
    (purse,) = gateway.app.means.budgets._purses.values()
    async with fleet.connection() as connection:
        assert await connection.fetchval("SELECT sum(tokens) FROM budget_hold") == purse.tokens


async def test_gateways_together_never_exceed_it(fleet, database_url) -> None:
    """Three processes take and spend at once: what is used and held is the budget, to the token."""
    await fleet.key(token_budget=1000)
    async with fleet.connection() as connection:
        key_id = await connection.fetchval("SELECT id FROM key")
    key = KeyEntry(id=key_id, project_id=fleet.project_id, budget=Budget(tokens=1000))
    gateways = [Budgets(database_url, f"gw{number}", number) for number in range(3)]

    async def spend(budgets: Budgets) -> int:
        try:
            return (await budgets.hold(key, 7, 0)).tokens
        except Problem:
            return 0

    spent = sum(await asyncio.gather(*(spend(budgets) for _ in range(80) for budgets in gateways)))
    in_hand = sum(budgets._purses[key_id].tokens for budgets in gateways)
    async with fleet.connection() as connection:
        assert await connection.fetchval("SELECT sum(tokens) FROM budget_hold") == spent + in_hand == 1000
    assert spent >= 1000 - 3 * 7
    for budgets in gateways:
        await budgets.close()
    async with fleet.connection() as connection:
        assert await connection.fetchval("SELECT count(*) FROM budget_hold") == 0


async def test_a_month_ends(fleet, database_url, monkeypatch) -> None:
    await fleet.key(token_budget=10, budget_period="month")
    async with fleet.connection() as connection:
        key_id = await connection.fetchval("SELECT id FROM key")
    key = KeyEntry(id=key_id, project_id=fleet.project_id, budget=Budget(tokens=10, period="month"))
    budgets = Budgets(database_url, "gw0", 1)
    await budgets.hold(key, 10, 0)
    with pytest.raises(Problem):
        await budgets.hold(key, 1, 0)
    purse = budgets._purses[key_id]
    async with fleet.connection() as connection:
        await connection.execute("UPDATE budget_hold SET period_start = period_start - interval '1 month'")
        await connection.execute("UPDATE budget_use SET period_start = period_start - interval '1 month'")
    purse.end = 0.0
    assert (await budgets.hold(key, 10, 0)).tokens == 10
    await budgets.close()


async def test_the_database_away(fleet, database_url) -> None:
    """What is in hand is spent; then it says that the quota is not sufficient."""
    await fleet.key(token_budget=100_000)
    async with fleet.connection() as connection:
        key_id = await connection.fetchval("SELECT id FROM key")
    key = KeyEntry(id=key_id, project_id=fleet.project_id, budget=Budget(tokens=100_000))
    budgets = Budgets(database_url, "gw0", 1)
    await budgets.hold(key, 10, 0)
    budgets._url = "postgresql://nobody@127.0.0.1:1/none"
    assert budgets._connection is not None
    budgets._connection.terminate()
    for _ in range(99):
        await budgets.hold(key, 10, 0)
    with pytest.raises(Problem) as refused:
        await budgets.hold(key, 10, 0)
    assert (refused.value.status, refused.value.code) == (429, "insufficient_quota")


async def test_holds_of_a_killed_process_are_let_go(gateway_settings, fleet, engine, http, database_url) -> None:
    """What it held is free again when the next process of that name has settled its journal."""
    async with fleet.connection() as connection:
        await connection.execute(
            "INSERT INTO budget_hold (gateway, since_segment, key_id, period, period_start, tokens)"
            " VALUES ('gw0', 5, 'key_x', 'total', to_timestamp(0), 9), ('other', 5, 'key_x', 'total', to_timestamp(0), 9)"
        )
    from controlplane.gateway.server import running

    async with running(gateway_settings), fleet.connection() as connection, asyncio.timeout(10):
        while await connection.fetchval("SELECT json_agg(gateway) FROM budget_hold") != json.dumps(["other"]):
            await asyncio.sleep(0.05)
