"""Limits of keys, changes of keys, and what the process says of itself."""

from __future__ import annotations

import asyncio
import time

from tests.api.gateway.talk import CHAT, error_of, post


async def test_token_limit_is_reserved_before_sending(gateway, engine, http, fleet) -> None:
    """Five at once on a limit of 100 tokens: exactly one goes through, and refusals cost nothing."""
    key = await fleet.key(tokens_per_minute=100, requests_per_minute=10)
    headers = {"authorization": f"Bearer {key}"}
    calls = [post(http, gateway, {**CHAT, "max_tokens": 100}, headers=headers) for _ in range(5)]
    answers = await asyncio.gather(*calls)
    assert sorted(status for status, _, _ in answers) == [200, 429, 429, 429, 429]
    refused = next(answer for answer in answers if answer[0] == 429)
    assert error_of(refused[2])["type"] == "rate_limit_error"
    assert int(refused[1]["retry-after"]) >= 1
    assert int(refused[1]["retry-after-ms"]) >= 1
    assert refused[1]["x-ratelimit-remaining-requests"] == "9"
    assert len(engine.seen) == 1


async def test_unspent_tokens_are_given_back(gateway, http, fleet) -> None:
    key = await fleet.key(tokens_per_minute=1000)
    headers = {"authorization": f"Bearer {key}"}
    for _ in range(5):
        status, answered, _ = await post(http, gateway, {**CHAT, "max_tokens": 900}, headers=headers)
        assert status == 200
    assert int(answered["x-ratelimit-limit-tokens"]) == 1000


async def test_key_changes_take_effect_within_a_second(gateway, fleet, http) -> None:
    key = await fleet.key(models=["chat"])
    headers = {"authorization": f"Bearer {key}"}
    assert (await post(http, gateway, headers=headers))[0] == 200
    await fleet.execute("UPDATE key SET models = '{other}' WHERE hint = $1", key[-4:], topic="keys")
    start = time.monotonic()
    while (await post(http, gateway, headers=headers))[0] != 404:
        assert time.monotonic() - start < 1.0
    await fleet.execute("DELETE FROM key WHERE hint = $1", key[-4:], topic="keys")
    start = time.monotonic()
    while (await post(http, gateway, headers=headers))[0] != 401:
        assert time.monotonic() - start < 1.0


async def test_lost_notification_costs_a_second(gateway, fleet, http) -> None:
    """The version number alone suffices."""
    key = await fleet.key()
    headers = {"authorization": f"Bearer {key}"}
    assert (await post(http, gateway, headers=headers))[0] == 200
    async with fleet.connection() as connection, connection.transaction():
        await connection.execute("DELETE FROM key WHERE hint = $1", key[-4:])
        await connection.execute("UPDATE gateway_version SET version = version + 1 WHERE topic = 'keys'")
    start = time.monotonic()
    while (await post(http, gateway, headers=headers))[0] != 401:
        assert time.monotonic() - start < 2.5
        await asyncio.sleep(0.05)


async def test_health_and_metrics(gateway, http) -> None:
    await post(http, gateway)
    await post(http, gateway, {**CHAT, "model": "x" * 100})
    async with http.get(f"{gateway.url}/healthz") as reply:
        assert (reply.status, await reply.json()) == (200, {"status": "ok", "database": "up"})
    async with http.get(f"{gateway.url}/metrics") as reply:
        text = await reply.text()
    assert 'bedplate_gateway_requests_total{model="chat",status="200"} 1.0' in text
    assert 'bedplate_gateway_requests_total{model="unknown",status="404"} 1.0' in text
    assert 'bedplate_gateway_tokens_total{kind="completion",model="chat"} 3.0' in text
    assert "bedplate_gateway_inflight 0.0" in text
