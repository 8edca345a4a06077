"""What API and gateway may listen on: refused with a reason, plain HTTP on loopback alone, IPv6 in brackets."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.listener import Face, ListenerRefused, bind, open_listener, refuse_plain_http, tls_files
from controlplane.settings import ApiSettings, GatewaySettings, Settings, TlsSettings

FACES: list[Face] = ["api", "gateway"]


@pytest.fixture(autouse=True)
def _no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BEDPLATE_CONFIG", str(tmp_path / "none.toml"))


def settings_of(listen: str, **more: bool) -> Settings:
    return Settings(api=ApiSettings(listen=listen), gateway=GatewaySettings(listen=listen), **more)


@pytest.mark.parametrize("listen", ["127.0.0.1:http", "127.0.0.1:99999", "127.0.0.1"])
def test_a_port_is_a_number(listen: str) -> None:
    with pytest.raises(ListenerRefused, match=f"cannot listen on {listen}: a port is a number"):
        bind(listen)


def test_a_taken_port_is_said() -> None:
    with bind("127.0.0.1:0") as taken, pytest.raises(ListenerRefused, match="in use"):
        bind(f"127.0.0.1:{taken.getsockname()[1]}")


def test_certificates_that_cannot_be_used_are_said(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    assert tls_files(TlsSettings()) is None
    with pytest.raises(ListenerRefused, match="both a certificate and a key"):
        tls_files(TlsSettings(certificate=nothing))
    with pytest.raises(ListenerRefused, match="cannot use the certificate"):
        tls_files(TlsSettings(certificate=nothing, key=nothing))


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1", ":1", "192.0.2.1:1"])
def test_plain_http_elsewhere_must_be_asked_for(face: Face, listen: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ListenerRefused, match=r"plain HTTP.*BEDPLATE_INSECURE_HTTP"):
        refuse_plain_http(settings_of(listen), face)
    assert not caplog.records
    refuse_plain_http(settings_of(listen, insecure_http=True), face)
    assert "speaks plain HTTP" in caplog.text


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(("listen", "url"), [("127.0.0.1:0", "http://127.0.0.1:"), ("[::1]:0", "http://[::1]:")])
def test_plain_http_on_loopback_needs_no_word(face: Face, listen: str, url: str) -> None:
    listener = open_listener(settings_of(listen), face)
    with listener.socket:
        assert listener.url.startswith(url)
        assert listener.context_factory is None
