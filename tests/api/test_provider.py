"""Providers outside: the operator's, their keys sealed, their models behind routes."""

from __future__ import annotations

import asyncpg

ASKED = {
    "name": "anthropic",
    "kind": "anthropic",
    "base_url": "https://api.example.com/",
    "key": "sk-0123456789abcdef",
    "models": ["claude-3-opus"],
}


async def test_life_of_a_provider(operator, member, database_url) -> None:
    made = await operator.post("/v1/providers", json=ASKED)
    assert made.status_code == 201, made.text
    shown = made.json()
    assert (shown["base_url"], shown["hint"], shown["project_ids"]) == ("https://api.example.com", "cdef", None)
    assert ASKED["key"] not in made.text
    connection = await asyncpg.connect(database_url)
    try:
        sealed = await connection.fetchval("SELECT sealed_key FROM provider")
        assert ASKED["key"].encode() not in sealed
        changed = await operator.patch("/v1/providers/anthropic", json={"key": "sk-other-other-other", "projects": ["ours"]})
        assert changed.status_code == 200, changed.text
        assert (changed.json()["hint"], len(changed.json()["project_ids"])) == ("ther", 1)
        assert await connection.fetchval("SELECT sealed_key FROM provider") != sealed
        logged = await connection.fetchval("SELECT string_agg(a::text, ' ') FROM audit a")
        assert "sk-o" not in (logged or "")
    finally:
        await connection.close()
    assert (await member.post("/v1/providers", json=ASKED)).status_code in (403, 404)
    assert (await operator.delete("/v1/providers/anthropic")).status_code == 204


async def test_refusals(operator) -> None:
    for change, code in (
        ({"base_url": "http://api.example.com"}, "request.invalid"),
        ({"base_url": "ftp://x"}, "request.invalid"),
        ({"models": []}, "request.invalid"),
        ({"projects": ["none"]}, "provider.project_unknown"),
    ):
        assert (await operator.post("/v1/providers", json={**ASKED, **change})).json()["code"] == code


async def test_behind_a_route(operator, member) -> None:
    await operator.post("/v1/providers", json={**ASKED, "projects": ["ours"]})
    routes = "/v1/projects/ours/routes"
    made = await member.post(routes, json={"name": "chat", "targets": [{"endpoint": "anthropic/claude-3-opus", "weight": 3}]})
    assert made.status_code == 201, made.text
    (target,) = made.json()["targets"]
    assert (target["endpoint"], target["weight"]) == ("anthropic/claude-3-opus", 3)
    assert (await operator.delete("/v1/providers/anthropic")).json()["code"] == "provider.in_use"
    wrong = await member.post(routes, json={"name": "b", "targets": [{"endpoint": "anthropic/other"}]})
    assert wrong.json()["code"] == "route.target_invalid"
    assert (await member.delete(f"{routes}/chat")).status_code == 204
