"""One authority for all tests of this folder; a state directory for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from controlplane.core.sealing import Sealer
from controlplane.settings import AcmeSettings, ApiSettings, CertificateSettings, Settings
from tests.api.certificate.authority import Pebble, running


@pytest.fixture(scope="package")
def pebble(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pebble]:
    with running(tmp_path_factory.mktemp("pebble")) as started:
        yield started


@pytest.fixture(autouse=True)
def _quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library looks at an order once a second; here the authority is faster."""
    pause = time.sleep
    monkeypatch.setattr("acme.client.time", SimpleNamespace(sleep=lambda _: pause(0.02)))


@pytest.fixture
def sealer() -> Sealer:
    return Sealer(bytes(range(32)))


@pytest.fixture
def settings_for(tmp_path, monkeypatch) -> Callable[[AcmeSettings], Settings]:
    monkeypatch.setenv("BEDPLATE_CONFIG", str(tmp_path / "none.toml"))
    return lambda acme: Settings(
        state_dir=tmp_path / "state", api=ApiSettings(listen="127.0.0.1:0"), tls=CertificateSettings(acme=acme)
    )
