"""When a certificate is renewed, what is accepted as one, and what the listener for challenges says."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from controlplane.certificate import schedule
from controlplane.certificate.challenge import PATH, ChallengeUnanswerable, Responder
from controlplane.certificate.conversation import AcmeFailed, Fetched
from controlplane.certificate.renewal import check
from controlplane.certificate.store import Held, Record, Store, pem_of
from controlplane.cli.certificates import Authority
from controlplane.listener import open_listener
from controlplane.settings import AcmeSettings, ApiSettings, CertificateSettings, GatewaySettings, Settings, TlsSettings

NOW = datetime(2026, 11, 30, tzinfo=UTC)
ACME = AcmeSettings(domains=("a.test", "b.test"), terms_agreed=True)


def held(*, days: float = 90, names: frozenset[str] = frozenset({"a.test", "b.test"}), serial: int = 1) -> Held:
    return Held(
        names=names,
        issuer="CN=x",
        serial=serial,
        not_before=NOW,
        not_after=NOW + timedelta(days=days),
        is_self_signed=False,
    )


@given(serial=st.integers(min_value=0, max_value=1 << 159), days=st.floats(min_value=0.25, max_value=3650))
def test_it_is_renewed_with_a_third_of_its_life_left(serial: int, days: float) -> None:
    one = held(days=days, serial=serial)
    left = (one.not_after - schedule.renew_at(one)) / (one.not_after - one.not_before)
    assert 1 / 3 - 1e-6 <= left <= 1 / 3 + 1 / 30 + 1e-6
    assert schedule.renew_at(one) == schedule.renew_at(one), "a restart does not change it"


def test_many_are_not_renewed_at_once() -> None:
    assert len({schedule.renew_at(held(serial=serial)) for serial in range(50)}) == 50


@pytest.mark.parametrize(
    ("shown", "record", "why"),
    [
        (None, Record(), "no certificate yet"),
        (replace(held(), is_self_signed=True), Record(), "no certificate yet"),
        (held(names=frozenset({"a.test"})), Record(), "does not name b.test"),
        (held(), Record(issued_for="others"), "settings changed"),
    ],
)
def test_what_is_due_at_once(shown: Held | None, record: Record, why: str) -> None:
    due = schedule.due(ACME, shown, record, NOW)
    assert due.at <= NOW
    assert why in due.why


def test_failures_wait_longer_each_time_and_as_long_as_told() -> None:
    record, pauses = Record(), []
    for _ in range(12):
        record = schedule.failed(ACME, record, NOW, "no", retry_after=None)
        pauses.append(datetime.fromisoformat(record.next_try_at) - NOW)
        assert schedule.due(ACME, None, record, NOW).at == NOW + pauses[-1]
    assert timedelta(minutes=3) < pauses[0] < timedelta(minutes=7)
    assert all(timedelta(hours=4) < pause < timedelta(hours=8) for pause in pauses[7:])
    told = schedule.failed(ACME, Record(), NOW, "limited", retry_after=timedelta(days=2))
    assert schedule.due(ACME, None, told, NOW).at == NOW + timedelta(days=2)
    other = ACME.model_copy(update={"domains": ("c.test",)})
    assert schedule.due(other, None, told, NOW).at <= NOW, "other settings deserve a try at once"
    assert schedule.failed(other, told, NOW, "no", retry_after=None).failures == 1


def test_a_failed_renewal_does_not_hurry_a_good_certificate() -> None:
    record = schedule.failed(ACME, schedule.succeeded(ACME), NOW, "no", retry_after=None)
    assert schedule.due(ACME, held(), record, NOW).at == schedule.renew_at(held())


def issued(*names: str) -> Fetched:
    made = Authority.make("x").issue(names)
    return Fetched(key_pem=made.key_pem, chain_pem=made.certificate_pem)


def test_only_what_was_asked_for_is_accepted() -> None:
    good, now = issued("a.test", "b.test"), datetime.now(UTC)
    check(good, ("a.test", "b.test"), now)
    wrong_key = replace(good, key_pem=pem_of(ec.generate_private_key(ec.SECP256R1())))
    for fetched, names, when, words in (
        (wrong_key, ("a.test",), now, "another key"),
        (good, ("a.test", "c.test"), now, "does not name c.test"),
        (good, ("a.test",), now + timedelta(days=9999), "clock"),
        (replace(good, chain_pem=b"-----BEGIN"), ("a.test",), now, "cannot be read"),
    ):
        with pytest.raises(AcmeFailed, match=words):
            check(fetched, names, when)


def test_what_is_on_disk_may_be_anything(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.held() is None
    assert store.record() == Record()
    for content in (b"", b"x", b'{"failures": "many", "other": 1}', b"[]"):
        store.pem.write_bytes(content)
        (tmp_path / "renewal.json").write_bytes(content)
        assert store.held() is None
        assert store.record() == Record()


def test_a_placeholder_never_replaces_a_certificate(tmp_path: Path) -> None:
    store = Store(tmp_path / "acme")
    store.ensure_placeholder(["a.test"])
    first = store.held()
    assert first is not None
    assert (first.is_self_signed, first.names) == (True, {"a.test"})
    store.ensure_placeholder(["b.test"])
    assert store.held() == first
    assert [path.name for path in store.directory.iterdir()] == ["server.pem"]


def test_with_names_both_listeners_speak_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_CONFIG", str(tmp_path / "none.toml"))
    files = TlsSettings(certificate=tmp_path / "own.pem", key=tmp_path / "own.key")
    settings = Settings(state_dir=tmp_path, tls=CertificateSettings(acme=ACME), api=ApiSettings(listen="0.0.0.0:0", tls=files))
    assert settings.tls_of(settings.api.tls) == files, "a certificate of one's own wins"
    bare = settings.model_copy(
        update={"api": ApiSettings(listen="0.0.0.0:0"), "gateway": GatewaySettings(listen="127.0.0.1:0")}
    )
    for face in ("api", "gateway"):
        listener = open_listener(bare, face)
        with listener.socket:
            assert listener.url.startswith("https://")


@pytest.mark.parametrize(
    "values",
    [
        {"domains": "*.a.test"},
        {"domains": "a_b.test"},
        {"domains": "https://a.test"},
        {"directory_url": "http://ca.test/dir"},
        {"email": "someone"},
        {"challenge": "dns-01"},
    ],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        AcmeSettings.model_validate(values)


def test_names_are_given_with_commas_or_as_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BEDPLATE_CONFIG", str(tmp_path / "config.toml"))
    for text in ("A.test, b.test", '["a.test", "b.test"]'):
        monkeypatch.setenv("BEDPLATE_TLS__ACME__DOMAINS", text)
        assert Settings().tls.acme.domains == ("a.test", "b.test")
    monkeypatch.delenv("BEDPLATE_TLS__ACME__DOMAINS")
    (tmp_path / "config.toml").write_text('[tls.acme]\ndomains = ["a.test", "b.test"]\n')
    assert Settings().tls.acme.domains == ("a.test", "b.test")


async def shut(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def ask(port: int, head: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    try:
        return await asyncio.wait_for(reader.read(), 15)
    except ConnectionResetError:
        return b""
    finally:
        await shut(writer)


async def test_the_challenge_listener_says_only_what_it_was_given() -> None:
    async with Responder.listening("127.0.0.1:0") as responder:
        responder.answers[f"{PATH}token"] = "token.thumbprint"
        good = await ask(responder.port, f"GET {PATH}token HTTP/1.1\r\nhost: a.test\r\n\r\n".encode())
        assert good.startswith(b"HTTP/1.1 200 ")
        assert good.endswith(b"\r\n\r\ntoken.thumbprint")
        head = await ask(responder.port, f"HEAD {PATH}token HTTP/1.1\r\n\r\n".encode())
        assert head.endswith(b"content-length: 16\r\nconnection: close\r\n\r\n")
        for asked in (
            f"GET {PATH}other HTTP/1.1",
            f"POST {PATH}token HTTP/1.1",
            f"GET {PATH}../token HTTP/1.1",
            "GET / HTTP/1.1",
            "x",
        ):
            assert (await ask(responder.port, f"{asked}\r\n\r\n".encode())).startswith(b"HTTP/1.1 404 ")
        assert await ask(responder.port, b"GET / HTTP/1.1\r\n" + b"x" * 20_000) == b"", "a head has its limit"
        crowd = [await asyncio.open_connection("127.0.0.1", responder.port) for _ in range(64)]
        assert await ask(responder.port, f"GET {PATH}token HTTP/1.1\r\n\r\n".encode()) == b"", "a crowd is not served for ever"
        for _, writer in crowd:
            await shut(writer)
        with pytest.raises(ChallengeUnanswerable, match="in use"):
            async with Responder.listening(f"127.0.0.1:{responder.port}"):
                pass
    for listen in ("127.0.0.1:http", "127.0.0.1:99999", "192.0.2.1:0"):
        with pytest.raises(ChallengeUnanswerable):
            async with Responder.listening(listen):
                pass
