"""What a key may do: from where, for what, how much at a time."""

from __future__ import annotations

import asyncio
from ipaddress import ip_network

import pytest

from controlplane.gateway.directory import KeyEntry
from tests.api.gateway.mock_engine import well_behaved
from tests.api.gateway.test_gateway_faults import CHAT, error_of, post


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_from_where(gateway, fleet, engine, http) -> None:
    elsewhere = await fleet.key(allowed_cidrs=[ip_network("192.0.2.0/24")])
    here = await fleet.key(allowed_cidrs=[ip_network("127.0.0.0/8"), ip_network("fd00::/8")])
    status, headers, body = await post(http, gateway, headers=bearer(elsewhere))
    assert (status, error_of(body)["code"], headers["x-should-retry"]) == (403, "ip_not_allowed", "false")
    assert not engine.seen
    assert (await post(http, gateway, headers=bearer(here)))[0] == 200


@pytest.mark.parametrize(
    ("address", "may"),
    [("10.1.2.3", True), ("::ffff:10.1.2.3", True), ("11.0.0.1", False), ("fd00::1", True), ("fe80::1", False), ("", False)],
)
def test_addresses(address: str, may: bool) -> None:
    key = KeyEntry(id="k", project_id="p", allowed_cidrs=(ip_network("10.0.0.0/8"), ip_network("fd00::/8")))
    assert key.may_come_from(address) is may


async def test_for_what(gateway, fleet, engine, http) -> None:
    key = await fleet.key(scopes=["chat"])
    assert (await post(http, gateway, headers=bearer(key)))[0] == 200
    status, _, body = await post(http, gateway, {"model": "chat", "input": "x"}, headers=bearer(key), path="/v1/embeddings")
    assert (status, error_of(body)["code"]) == (403, "permission_denied")
    assert len(engine.seen) == 1
    async with http.get(f"{gateway.url}/v1/models", headers=bearer(key)) as reply:
        assert reply.status == 200


async def test_how_much_at_a_time(gateway, fleet, engine, http) -> None:
    """Two at a time: the third is refused, costs nothing, and goes when one has ended, however it ended."""
    key = await fleet.key(max_concurrent=2, requests_per_minute=10)
    release = asyncio.Event()

    async def hold(seen, peer) -> None:
        await release.wait()
        await well_behaved(seen, peer)

    engine.answer = hold
    held = [asyncio.create_task(post(http, gateway, headers=bearer(key))) for _ in range(2)]
    async with asyncio.timeout(10):
        while len(engine.seen) < 2:
            await asyncio.sleep(0.01)
    status, headers, body = await post(http, gateway, CHAT, headers=bearer(key))
    assert (status, error_of(body)["type"]) == (429, "rate_limit_error")
    assert int(headers["retry-after"]) >= 1
    assert headers["x-ratelimit-remaining-requests"] == "8"
    held[0].cancel()
    async with asyncio.timeout(5):
        while gateway.app.means.limiter.running != 1:
            await asyncio.sleep(0.01)
    release.set()
    assert (await post(http, gateway, headers=bearer(key)))[0] == 200
    assert (await held[1])[0] == 200
    assert not gateway.app.means.limiter.running
