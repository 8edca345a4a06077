"""The API keeps its certificate fresh: a process with a real authority, an open stream, and what an operator sees."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from prometheus_client import CollectorRegistry

from controlplane.api.certificate import CODE, CertificateKeeper
from controlplane.certificate.store import Held, Store
from controlplane.core.clock import ManualClock
from controlplane.keyfile import load_sealer
from tests.api.process import PATIENCE_SECONDS, ROOT, Process, Stream, client_of

pytestmark = pytest.mark.caps("pebble")


@pytest.fixture
def process(tmp_path, database_url):
    made = Process(directory=tmp_path, database_url=database_url, environment={})
    yield made
    if made.process is not None:
        made.process.kill()
        made.process.wait()


def presented(port: int, trusted: ssl.SSLContext | None, name: str) -> int:
    """The serial number of what a listener shows; with `trusted` it must be good for the name."""
    context = trusted or ssl._create_unverified_context()
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as raw,
        context.wrap_socket(raw, server_hostname=name) as wrapped,
    ):
        return Held.of(ssl.DER_cert_to_PEM_cert(wrapped.getpeercert(binary_form=True)).encode()).serial


async def until(condition, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.1)


def command(process: Process, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """A command of the operator on the server's machine."""
    names = {"BEDPLATE_STATE_DIR": str(process.directory / "state"), "BEDPLATE_CONFIG": str(process.directory / "none.toml")}
    argv = [sys.executable, "-m", "controlplane.cli.main", "cert", *words]
    return subprocess.run(
        argv,
        env={**os.environ, **names, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
        stdin=subprocess.DEVNULL,
    )


async def test_it_is_fetched_at_the_start_and_renewed_without_cutting_a_stream(process, pebble) -> None:
    name = "keeper.test"
    store = Store(process.directory / "state/tls/acme")
    environment, trusted = pebble.environment(name), pebble.trusted()
    process.start(**environment)
    context = ssl._create_unverified_context()
    async with client_of(process, "https", verify=context) as client:
        await process.ready(client)

        def is_good() -> bool:
            try:
                return presented(process.port, trusted, name) == store.held().serial
            except ssl.SSLCertVerificationError:
                return False

        await until(is_good, f"no certificate of the authority is shown:\n{process.words}")
        first = store.held().serial
        client.headers["authorization"] = f"Bearer {process.token}"
        async with client.stream("GET", "/v1/events", params={"after": "0", "kind": "project."}) as response:
            stream = Stream(response)
            renewed = await asyncio.to_thread(command, process, environment, "acme", "--force")
            assert (renewed.returncode, renewed.stdout.strip()) == (0, str(store.pem)), renewed.stderr
            assert "certificate fetched: keeper.test" in renewed.stderr
            await until(lambda: presented(process.port, trusted, name) != first, "the renewed one is not taken in")
            await client.post("/v1/projects", json={"name": "search"})
            assert (await stream.next())["event"] == "project.create"
        metrics = (await client.get("/metrics")).text
    assert "bedplate_certificate_not_after_seconds" in metrics
    assert "Traceback" not in process.words
    shown = await asyncio.to_thread(command, process, environment, "show", "-o", "json")
    api, gateway = json.loads(shown.stdout)
    assert (api["name"], api["source"], api["names"], api["failures"]) == ("api", "acme", [name], 0)
    assert gateway["path"] == api["path"] == str(store.pem)
    assert datetime.fromisoformat(api["renew_at"]) > datetime.now(UTC)


async def test_a_failure_is_an_incident_until_it_is_mended(pebble, settings_for, database, monkeypatch, tmp_path) -> None:
    pebble.point("incident.test", "127.0.0.9")
    settings = settings_for(pebble.acme("incident.test"))
    for variable, value in pebble.environment("incident.test").items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("BEDPLATE_STATE_DIR", str(settings.state_dir))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    load_sealer(settings)
    clock = ManualClock(datetime.now(UTC))
    keeper = CertificateKeeper(settings=settings, database=database, clock=clock, registry=CollectorRegistry())

    async def incidents() -> list[tuple[str, int, bool]]:
        rows = await database.pool.fetch("SELECT code, detail, count, resolved_at FROM incident")
        assert all("incident.test: connection" in row["detail"] for row in rows)
        return [(row["code"], row["count"], row["resolved_at"] is None) for row in rows]

    await keeper.look()
    assert await incidents() == [(CODE, 1, True)]
    await keeper.look()
    assert await incidents() == [(CODE, 1, True)], "it waits before it asks again"

    pebble.point("incident.test", "127.0.0.1")
    store = Store(settings.acme_directory)
    store.put_record(replace(store.record(), next_try_at=clock.now().isoformat()))
    await keeper.look()
    assert await incidents() == [(CODE, 1, False)]
    held = store.held()
    assert held is not None

    clock.advance((held.not_after - datetime.now(UTC)).total_seconds() / 2)
    await keeper.look()
    assert store.held() == held, "it is left alone at half its life"


def test_the_command_says_what_is_missing(tmp_path) -> None:
    process = Process(directory=tmp_path, database_url="", environment={})
    nothing = command(process, {}, "acme")
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert "BEDPLATE_TLS__ACME__DOMAINS" in nothing.stderr
    wrong = command(process, {"BEDPLATE_TLS__ACME__DOMAINS": "*.example.test"}, "show")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    table = command(process, {}, "show")
    assert [line.split() for line in table.stdout.splitlines()][1:] == [["api", "none"], ["gateway", "none"]]
