"""Streams end when the right to them does: revoked tokens, ended sessions, lost memberships; and other sites open none."""

from __future__ import annotations

import asyncio

import httpx2
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from controlplane.api import standing
from tests.api.process import Stream
from tests.api.test_sign_in import browser, signed_in
from tests.api.test_vm_stream import VMS, url, vm, watch

__all__ = ["browser", "url", "vm", "watch"]

SOON_SECONDS = 10  # many times what a look takes


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(standing, "RECHECK_SECONDS", 0.1)


@pytest.fixture
async def http(url):
    async with httpx2.AsyncClient(base_url=url.replace("ws", "http", 1), trust_env=False) as client:
        yield client


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def cookie(browser) -> dict[str, str]:
    return {"cookie": f"bedplate_session={browser.cookies['bedplate_session']}"}


async def ended(response) -> list[str]:
    async with asyncio.timeout(SOON_SECONDS):
        return [line async for line in response.aiter_lines()]


async def test_a_revoked_token_ends_its_event_stream(api, operator, http):
    async with http.stream("GET", "/v1/events", headers=bearer(api.member_token)) as response:
        assert (await operator.delete("/v1/tokens/member")).status_code == 204
        assert await ended(response)
    assert (await http.get("/v1/events", headers=bearer(api.member_token))).status_code == 401


async def test_a_lost_role_ends_the_event_stream_and_nothing_is_lost(api, operator, browser, http):
    """The person goes on behind the position that the stream told, and sees what is still theirs."""
    feed = api.app.state.services.events
    await signed_in(operator, browser, "ada")
    for project in ("ours", "theirs"):
        await operator.post(f"/v1/projects/{project}/members", json={"user": "ada", "role": "viewer"})
    async with http.stream("GET", "/v1/events", headers=cookie(browser)) as response:
        assert (await operator.delete("/v1/projects/theirs/members/ada")).status_code == 204
        lines = await ended(response)
    position = [line.removeprefix("id: ") for line in lines if line.startswith("id: ")][-1]
    for project in ("ours", "theirs"):
        assert (await operator.patch(f"/v1/projects/{project}", json={"description": "x"})).status_code == 200
    await feed.publish()
    again = {**cookie(browser), "last-event-id": position}
    async with http.stream("GET", "/v1/events", params={"kind": "project."}, headers=again) as response:
        stream = Stream(response)
        async with asyncio.timeout(SOON_SECONDS):
            assert '"name":"ours"' in (await stream.next())["data"]
        assert (await browser.delete("/v1/sessions/current")).status_code == 204
        async with asyncio.timeout(SOON_SECONDS):
            assert [line async for line in stream.lines if line.startswith("data")] == []


async def test_an_open_stream_keeps_no_session_from_being_idle(api, operator, browser, http):
    await signed_in(operator, browser, "ada")
    async with api.database.pool.acquire() as connection:
        async with http.stream("GET", "/v1/events", headers=cookie(browser)) as response:
            used_at = "UPDATE session SET last_used_at = now() - interval '11 hours 59 minutes 59 seconds'"
            await connection.execute(used_at)
            await ended(response)
        assert await connection.fetchval("SELECT now() - last_used_at > interval '12 hours' FROM session")


async def test_a_database_that_is_away_closes_no_socket_at_once(api, vm, watch, url, monkeypatch):
    async with connect(f"{url}{VMS}/web/console", additional_headers=bearer(api.member_token)) as socket:
        assert await socket.recv() == b"hello\n"
        looks = []
        real = standing.authenticated

        async def away(*given, **more):
            looks.append(await real(*given, **more))
            raise ConnectionRefusedError

        monkeypatch.setattr(standing, "authenticated", away)
        async with asyncio.timeout(SOON_SECONDS):
            while len(looks) < 3:
                await socket.send(b"still here")
                assert await socket.recv() == b"STILL HERE"
        monkeypatch.setattr(standing, "GRACE_SECONDS", 0.0)
        with pytest.raises(ConnectionClosedError) as closed:
            await asyncio.wait_for(socket.recv(), SOON_SECONDS)
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1013, "unavailable")


@pytest.mark.parametrize("path", ["console", "port/22"])
async def test_a_revoked_token_closes_its_sockets(api, operator, vm, watch, url, path):
    async with connect(f"{url}{VMS}/web/{path}", additional_headers=bearer(api.member_token)) as socket:
        assert await socket.recv() == b"hello\n"
        await operator.delete("/v1/tokens/member")
        with pytest.raises(ConnectionClosedError) as closed:
            await asyncio.wait_for(socket.recv(), SOON_SECONDS)
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4401, "auth.token_invalid")


async def test_a_lower_role_closes_the_console_and_a_lost_one_the_log(api, operator, browser, vm, watch, url, http):
    watch.keeps_logs_open = True
    await signed_in(operator, browser, "ada")
    await operator.post("/v1/projects/ours/members", json={"user": "ada", "role": "editor"})
    ours = {**cookie(browser), "origin": url.replace("ws", "http", 1)}
    async with connect(f"{url}{VMS}/web/console", additional_headers=ours) as socket:
        assert await socket.recv() == b"hello\n"
        async with http.stream("GET", f"{VMS}/web/log", params={"follow": True}, headers=cookie(browser)) as log:
            parts = log.aiter_bytes()
            assert await anext(parts) == b"hello\n"
            await operator.patch("/v1/projects/ours/members/ada", json={"role": "viewer"})
            with pytest.raises(ConnectionClosedError) as closed:
                await asyncio.wait_for(socket.recv(), SOON_SECONDS)
            assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (4403, "auth.forbidden")
            await operator.delete("/v1/projects/ours/members/ada")
            with pytest.raises(httpx2.RemoteProtocolError):
                await asyncio.wait_for(anext(parts), SOON_SECONDS)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://evil.test"}, 403),
        ({"origin": "null"}, 403),
        ({}, 403),
        ({"sec-fetch-site": "cross-site", "origin": "OURS"}, 403),
        ({"sec-fetch-site": "same-site", "origin": "OURS"}, 403),
        ({"origin": "OURS"}, 101),
        ({"sec-fetch-site": "same-origin", "origin": "OURS"}, 101),
    ],
)
async def test_another_site_opens_no_console_with_our_cookie(operator, browser, vm, watch, url, headers, status):
    await signed_in(operator, browser, "ada", is_operator=True)
    sent = {name: value.replace("OURS", url.replace("ws", "http", 1)) for name, value in headers.items()}
    opening = connect(f"{url}{VMS}/web/console", additional_headers={**cookie(browser), **sent})
    if status == 101:
        async with opening as socket:
            assert await socket.recv() == b"hello\n"
        return
    with pytest.raises(InvalidStatus) as refused:
        await opening
    assert refused.value.response.status_code == status
    assert b"auth.cross_site" in refused.value.response.body
    assert watch.tickets == []
