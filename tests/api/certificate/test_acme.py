"""Certificates from a real ACME authority: fetched, renewed, refused in all the ways there are, and what stays then."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder
from cryptography.x509.verification import Store as Trusted

from controlplane.certificate.conversation import AcmeFailed
from controlplane.certificate.renewal import rehearse, renew
from controlplane.certificate.schedule import due, renew_at
from controlplane.certificate.store import RenewalBusy, Store
from controlplane.core.sealing import Sealer
from controlplane.listener import open_listener
from controlplane.settings import AcmeSettings
from tests.api.certificate.authority import free_port, running

pytestmark = pytest.mark.caps("pebble")


def store_of(settings) -> Store:
    return Store(settings.acme_directory)


async def refused(settings, sealer) -> str:
    """The words of a renewal that fails; what is shown must not change by it."""
    store = store_of(settings)
    before = store.pem.read_bytes() if store.pem.exists() else None
    with pytest.raises(AcmeFailed) as failure:
        await renew(settings, sealer, is_forced=True)
    assert (store.pem.read_bytes() if store.pem.exists() else None) == before
    record = store.record()
    assert record.last_error == str(failure.value)
    assert datetime.fromisoformat(record.next_try_at) > datetime.now(UTC) + timedelta(minutes=3)
    return record.last_error


async def test_one_is_fetched_shown_and_left_alone_while_it_is_good(pebble, settings_for, sealer) -> None:
    settings = settings_for(pebble.acme("api.one.test", "models.one.test"))
    open_listener(settings, "api").socket.close()
    store = store_of(settings)
    assert store.held().is_self_signed, "something is shown until the authority has answered"

    renewed = await renew(settings, sealer)

    assert renewed.is_new
    assert renewed.held.names == {"api.one.test", "models.one.test"}
    chain = x509.load_pem_x509_certificates(store.pem.read_bytes())
    roots = x509.load_der_x509_certificate(pebble.trusted().get_ca_certs(binary_form=True)[0])
    verifier = PolicyBuilder().store(Trusted([roots])).build_server_verifier(x509.DNSName("models.one.test"))
    assert verifier.verify(chain[0], chain[1:])
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in (store.pem, store.directory / "account.sealed")} == {
        "server.pem": "0o600",
        "account.sealed": "0o600",
    }
    with socket.socket() as probe:  # the challenge's port is closed again
        assert probe.connect_ex(("127.0.0.1", pebble.challenge_port)) != 0
    again = await renew(settings, sealer)
    assert (again.is_new, again.held.serial) == (False, renewed.held.serial)
    assert due(settings.tls.acme, store.held(), store.record(), datetime.now(UTC)).at == renew_at(renewed.held)


async def test_a_renewal_keeps_the_account_and_takes_a_new_key(pebble, settings_for, sealer) -> None:
    settings = settings_for(pebble.acme("again.test"))
    store = store_of(settings)
    first = await renew(settings, sealer)
    account, key = store.account(sealer, settings.tls.acme.directory_url), store.pem.read_bytes()[:200]
    second = await renew(settings, sealer, is_forced=True)
    assert second.held.serial != first.held.serial
    assert store.pem.read_bytes()[:200] != key
    assert store.account(sealer, settings.tls.acme.directory_url) == account


async def test_the_account_is_sealed(pebble, settings_for, sealer) -> None:
    settings = settings_for(pebble.acme("sealed.test"))
    await renew(settings, sealer)
    sealed = (settings.acme_directory / "account.sealed").read_bytes()
    account = store_of(settings).account(sealer, settings.tls.acme.directory_url)
    assert account is not None
    for part in (b"PRIVATE KEY", account.url.encode(), account.key_pem.split("\n")[1].encode()):
        assert part not in sealed
    assert store_of(settings).account(Sealer(bytes(32)), settings.tls.acme.directory_url) is None


async def test_the_operators_new_address_is_told(pebble, settings_for, sealer) -> None:
    settings = settings_for(pebble.acme("address.test"))
    await renew(settings, sealer)
    url = store_of(settings).account(sealer, settings.tls.acme.directory_url).url
    moved = settings_for(pebble.acme("address.test", email="second@bedplate.test"))
    assert (await renew(moved, sealer)).is_new
    account = store_of(moved).account(sealer, moved.tls.acme.directory_url)
    assert (account.url, account.email) == (url, "second@bedplate.test")


async def test_other_names_are_fetched_at_once(pebble, settings_for, sealer) -> None:
    await renew(settings_for(pebble.acme("names.test")), sealer)
    more = settings_for(pebble.acme("names.test", "www.names.test"))
    renewed = await renew(more, sealer)
    assert renewed.is_new
    assert "does not name www.names.test" in renewed.why
    fewer = await renew(settings_for(pebble.acme("names.test")), sealer)
    assert (fewer.is_new, fewer.held.names) == (True, {"names.test"})


async def test_an_authority_that_forgot_us_gets_a_new_account(settings_for, sealer, tmp_path) -> None:
    (tmp_path / "pebble").mkdir()
    with running(tmp_path / "pebble") as pebble:
        settings = settings_for(pebble.acme("forgotten.test"))
        await renew(settings, sealer)
        before = store_of(settings).account(sealer, settings.tls.acme.directory_url)
        pebble.stop()
        pebble.start()
        assert (await renew(settings, sealer, is_forced=True)).is_new
        account = store_of(settings).account(sealer, settings.tls.acme.directory_url)
        assert (account.key_pem, account.url != before.url) == (before.key_pem, True)


async def test_a_name_that_leads_elsewhere_is_refused_by_name(pebble, settings_for, sealer) -> None:
    await renew(settings_for(pebble.acme("here.test")), sealer)
    pebble.point("elsewhere.test", "127.0.0.9")
    words = await refused(settings_for(pebble.acme("here.test", "elsewhere.test")), sealer)
    assert "elsewhere.test: connection" in words
    assert "port 80" in words


async def test_another_server_at_the_port_is_refused(pebble, settings_for, sealer) -> None:
    """Something else answers there: the authority says that the answer is wrong."""

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", pebble.challenge_port), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        elsewhere = pebble.acme("shared.test", challenge_listen=f"127.0.0.1:{free_port()}")
        words = await refused(settings_for(elsewhere), sealer)
        taken = await refused(settings_for(pebble.acme("shared.test")), sealer)
        other.shutdown()
    assert "shared.test: unauthorized" in words
    assert "cannot listen on" in taken


async def test_an_authority_that_is_away_is_said(pebble, settings_for, sealer) -> None:
    away = pebble.acme("away.test", directory_url=f"https://localhost:{free_port()}/dir")
    assert "does not answer" in await refused(settings_for(away), sealer)
    unknown = pebble.acme("away.test", ca_file=None)
    assert "certificate verify failed" in (await refused(settings_for(unknown), sealer)).lower()
    missing = pebble.acme("away.test", ca_file=pebble.directory / "missing.pem")
    assert "missing.pem" in await refused(settings_for(missing), sealer)
    elsewhere = pebble.acme("away.test", directory_url=f"https://localhost:{pebble.management_port}/roots/0")
    assert "does not speak ACME" in await refused(settings_for(elsewhere), sealer)


async def test_terms_are_not_agreed_to_unasked(pebble, settings_for, sealer) -> None:
    words = await refused(settings_for(pebble.acme("terms.test", terms_agreed=False)), sealer)
    assert "BEDPLATE_TLS__ACME__TERMS_AGREED" in words
    assert "data:text/plain" in words, "it names the terms"


async def test_a_rate_limit_is_kept_to(settings_for, sealer) -> None:
    """The authority says when to come back; until then it hears nothing of us."""
    asked: list[str] = []
    port = free_port()
    base = f"http://127.0.0.1:{port}"

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        headers = {"replay-nonce": f"nonce{len(asked):03}"}
        match request.path:
            case "/dir":
                paths = {"newNonce": f"{base}/nonce", "newAccount": f"{base}/account", "newOrder": f"{base}/order"}
                return web.json_response(paths, headers=headers)
            case "/account":
                headers["location"] = f"{base}/account/1"
                return web.json_response({"status": "valid"}, status=201, headers=headers)
            case "/order":
                problem = {"type": "urn:ietf:params:acme:error:rateLimited", "detail": "too many certificates for limited.test"}
                headers["retry-after"] = "90000"
                return web.json_response(problem, status=429, headers=headers, content_type="application/problem+json")
        return web.Response(headers=headers)

    async with contextlib.AsyncExitStack() as stack:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", port).start()
        acme = AcmeSettings(
            domains=("limited.test",), directory_url=f"{base}/dir", terms_agreed=True, challenge_listen="127.0.0.1:0"
        )
        settings = settings_for(acme)
        assert "too many certificates for limited.test" in await refused(settings, sealer)
    assert "/order" in asked
    record = store_of(settings).record()
    assert datetime.fromisoformat(record.next_try_at) > datetime.now(UTC) + timedelta(hours=24)
    assert due(acme, None, record, datetime.now(UTC)).at == datetime.fromisoformat(record.next_try_at)


async def test_an_authority_in_trouble_is_quoted(settings_for, sealer) -> None:
    async def broken(_: web.Request) -> web.StreamResponse:
        return web.Response(status=502, text="Bad Gateway")

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", broken)
    runner = web.AppRunner(application)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    acme = AcmeSettings(domains=("broken.test",), directory_url=f"http://127.0.0.1:{port}/dir", challenge_listen="127.0.0.1:0")
    assert f"HTTP 502 from http://127.0.0.1:{port}/dir" in await refused(settings_for(acme), sealer)
    await runner.cleanup()


async def test_two_do_not_renew_at_once(pebble, settings_for, sealer) -> None:
    settings = settings_for(pebble.acme("busy.test"))
    with store_of(settings).locked(), pytest.raises(RenewalBusy):
        await renew(settings, sealer)


async def test_a_try_that_is_cut_off_is_not_made_again_at_once(pebble, settings_for, sealer, monkeypatch) -> None:
    settings = settings_for(pebble.acme("cut.test"))
    entered = asyncio.Event()

    async def hang(*_: object) -> None:
        entered.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("controlplane.certificate.renewal._fetch", hang)
    trying = asyncio.create_task(renew(settings, sealer))
    await asyncio.wait_for(entered.wait(), 10)
    trying.cancel()
    await asyncio.gather(trying, return_exceptions=True)
    record, now = store_of(settings).record(), datetime.now(UTC)
    assert record.failures == 0
    assert due(settings.tls.acme, None, record, now).at > now + timedelta(minutes=3)
    assert due(settings.tls.acme, None, replace(record, tried_for="others"), now).at <= now


async def test_a_rehearsal_orders_and_writes_nothing(pebble, settings_for, sealer) -> None:
    settings = settings_for(pebble.acme("rehearsed.test", terms_agreed=False))
    findings = await rehearse(settings, sealer)
    by_name = {finding.name: finding for finding in findings}
    assert (by_name["authority"].is_ok, by_name["terms"].is_ok) == (True, False)
    assert [finding.words for finding in findings if finding.name == "challenge"][1].startswith(
        "http://rehearsed.test does not"
    )
    assert not settings.acme_directory.exists()
    away = settings_for(pebble.acme("rehearsed.test", directory_url=f"https://localhost:{free_port()}/dir"))
    assert "does not answer" in {finding.name: finding for finding in await rehearse(away, sealer)}["authority"].words
