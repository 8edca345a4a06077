"""Keys: shown once, changed and revoked, published to the gateway."""

from __future__ import annotations

import hashlib

import asyncpg

KEYS = "/v1/projects/ours/keys"


async def test_create_shows_the_secret_once(member, database_url) -> None:
    made = await member.post(KEYS, json={"name": "app", "models": ["chat"], "requests_per_minute": 60})
    assert made.status_code == 201, made.text
    secret = made.json()["secret"]
    assert secret.startswith("bpk_")
    assert secret.endswith(made.json()["hint"])
    shown = await member.get(f"{KEYS}/app")
    assert "secret" not in shown.json()
    assert shown.json()["models"] == ["chat"]
    connection = await asyncpg.connect(database_url)
    try:
        stored = await connection.fetchval("SELECT secret_sha256 FROM key")
        assert stored == hashlib.sha256(secret.encode()).digest()
        assert await connection.fetchval("SELECT version FROM gateway_version WHERE topic = 'keys'") == 1
    finally:
        await connection.close()


async def test_where_and_for_what(member) -> None:
    asked = {"allowed_cidrs": ["10.0.0.0/8", "fd00::/8"], "scopes": ["chat"], "max_concurrent": 4, "labels": {"team": "search"}}
    made = await member.post(KEYS, json={"name": "app", **asked})
    assert made.status_code == 201, made.text
    assert {name: made.json()[name] for name in asked} == asked
    opened = await member.patch(f"{KEYS}/app", json={"allowed_cidrs": None, "scopes": None})
    assert (opened.json()["allowed_cidrs"], opened.json()["scopes"], opened.json()["max_concurrent"]) == (None, None, 4)


async def test_a_wrong_prefix_is_told_with_the_right_one(member) -> None:
    answer = await member.post(KEYS, json={"name": "b", "allowed_cidrs": ["10.0.0.1/8"]})
    (error,) = answer.json()["errors"]
    assert (error["pointer"], "the prefix is 10.0.0.0/8" in error["detail"]) == ("/allowed_cidrs/0", True)


async def test_change_and_revoke(member, stranger) -> None:
    await member.post(KEYS, json={"name": "app"})
    changed = await member.patch(f"{KEYS}/app", json={"models": ["b"], "tokens_per_minute": 5})
    assert changed.status_code == 200, changed.text
    assert (changed.json()["models"], changed.json()["generation"]) == (["b"], 2)
    assert changed.headers["etag"] == '"2"'
    assert (await stranger.get(f"{KEYS}/app")).status_code == 404
    assert (await member.delete(f"{KEYS}/app")).status_code == 204
    assert (await member.delete(f"{KEYS}/app")).status_code == 204
    assert (await member.get(f"{KEYS}/app")).json()["code"] == "key.not_found"
    assert (await member.post(KEYS, json={"name": "app"})).status_code == 201


async def test_refusals(member) -> None:
    await member.post(KEYS, json={"name": "app"})
    for body, status, code in (
        ({"name": "app"}, 409, "key.name_taken"),
        ({"name": "b", "expires_at": "2020-01-01T00:00:00Z"}, 422, "key.expiry_invalid"),
        ({"name": "b", "requests_per_minute": 0}, 422, "request.invalid"),
        ({"name": "B"}, 422, "request.invalid"),
        ({"name": "b", "secret": "mine"}, 422, "request.invalid"),
        ({"name": "b", "allowed_cidrs": ["10.0.0.1/8"]}, 422, "request.invalid"),
        ({"name": "b", "allowed_cidrs": []}, 422, "request.invalid"),
        ({"name": "b", "scopes": ["everything"]}, 422, "request.invalid"),
        ({"name": "b", "max_concurrent": 0}, 422, "request.invalid"),
    ):
        answer = await member.post(KEYS, json=body)
        assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert len((await member.get(KEYS)).json()["items"]) == 1


async def test_same_idempotency_key_gives_the_same_secret(member) -> None:
    headers = {"idempotency-key": "k1"}
    first = await member.post(KEYS, json={"name": "app"}, headers=headers)
    again = await member.post(KEYS, json={"name": "app"}, headers=headers)
    assert first.json()["secret"] == again.json()["secret"]
