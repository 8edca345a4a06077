"""The price book, budgets of keys, and usage as CSV."""

from __future__ import annotations

import csv
import io

import asyncpg
import pytest

from controlplane.core.money import micros_of, text_of


async def test_prices_are_the_operators(operator, member) -> None:
    asked = {"name": "chat-2027", "model": "chat", "prompt": "0.15", "completion": "0.6", "request": "0.000001"}
    made = await operator.post("/v1/prices", json=asked)
    assert made.status_code == 201, made.text
    shown = made.json()
    assert (shown["prompt"], shown["cached"], shown["completion"], shown["request"]) == ("0.15", None, "0.60", "0.000001")
    assert (await operator.post("/v1/prices", json=asked)).json()["code"] == "price.name_taken"
    again = {**asked, "name": "b", "valid_from": shown["valid_from"]}
    assert (await operator.post("/v1/prices", json=again)).json()["code"] == "price.time_taken"
    for wrong in ("-1", "1e3", "0.1234567", ""):
        assert (await operator.post("/v1/prices", json={**asked, "name": "c", "prompt": wrong})).status_code == 422
    assert (await member.post("/v1/prices", json=asked)).status_code in (403, 404)
    assert (await operator.delete("/v1/prices/chat-2027")).status_code == 204
    assert (await operator.get("/v1/prices/chat-2027")).json()["code"] == "price.not_found"


async def test_budgets_of_keys(member, database_url) -> None:
    keys = "/v1/projects/ours/keys"
    asked = {"name": "app", "token_budget": 1000, "money_budget": "12.5", "money_budget_soft": "10", "budget_period": "month"}
    made = await member.post(keys, json=asked)
    assert made.status_code == 201, made.text
    assert (made.json()["money_budget"], made.json()["money_budget_soft"]) == ("12.50", "10.00")
    changed = await member.patch(f"{keys}/app", json={"money_budget": None, "token_budget": 5})
    assert (changed.json()["money_budget"], changed.json()["token_budget"]) == (None, 5)
    assert (await member.post(keys, json={"name": "b", "money_budget": "0"})).status_code == 422
    connection = await asyncpg.connect(database_url)
    try:
        assert await connection.fetchval("SELECT money_budget_soft_micros FROM key") == 10_000_000
    finally:
        await connection.close()


async def test_usage_as_csv(member, database_url) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute(
            "INSERT INTO usage_hour (hour, project_id, key_id, model, requests, prompt_tokens, completion_tokens,"
            " cached_tokens, estimated_requests, unbilled_requests, cost_micros)"
            " SELECT date_trunc('hour', now()), id, 'key_1', '=cmd()', 2, 10, 20, 0, 0, 1, 1234567"
            " FROM project WHERE name = 'ours'"
        )
    finally:
        await connection.close()
    answer = await member.get("/v1/projects/ours/usage/export")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/csv")
    (row,) = csv.DictReader(io.StringIO(answer.text))
    assert (row["model"], row["requests"], row["cost"]) == ("'=cmd()", "2", "1.234567")
    (item,) = (await member.get("/v1/projects/ours/usage")).json()["items"]
    assert item["cost"] == "1.234567"


@pytest.mark.parametrize(
    ("text", "micros"), [("0", 0), ("12.5", 12_500_000), ("0.000001", 1), ("999999999999", 999999999999000000)]
)
def test_amounts(text: str, micros: int) -> None:
    assert micros_of(text) == micros
    assert micros_of(text_of(micros)) == micros
