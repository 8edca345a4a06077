"""Health checks against real servers on loopback, of both address families."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import ipaddress
import os
import resource
import ssl
import subprocess
import sys
import time
from dataclasses import replace

import h2.config
import h2.connection
import h2.events
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from hostagent.lib.wait import until
from hostagent.probes.attempt import WELL, Finding, attempt
from hostagent.probes.channel import tls
from hostagent.probes.prober import Prober, Target, Verdict, cost_per_second
from hostagent.protocol.network import ProbeWanted

TCP = ProbeWanted(kind="tcp", interval_ms=50, timeout_ms=500, rise=2, fall=3)
HTTP = replace(TCP, kind="http")
GRPC = replace(TCP, kind="grpc")
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LOOPBACK = pytest.mark.parametrize("address", ["127.0.0.1", "::1"])


@contextlib.asynccontextmanager
async def serving(handle, address="127.0.0.1", context=None):
    """The port on which `handle` answers."""
    handling = set()

    async def careful(reader, writer):
        handling.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError, EOFError, asyncio.CancelledError):
            await handle(reader, writer)
        writer.transport.abort()

    server = await asyncio.start_server(careful, address, 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in handling:
            task.cancel()
        await asyncio.gather(*handling, return_exceptions=True)
        await asyncio.sleep(0)  # what was aborted is closed in the loop's next turn


def answering(text: bytes, *, hang: bool = False):
    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(text)
        await writer.drain()
        if hang:
            await reader.read()

    return handle


async def closed_port() -> int:
    async with serving(answering(b"")) as port:
        return port


@LOOPBACK
async def test_tcp(address):
    async with serving(answering(b""), address) as port:
        assert await attempt(TCP, address, port) == WELL
    assert await attempt(TCP, address, await closed_port()) == ("Connection refused", "refused")


async def test_nobody_answers_in_time():
    async with serving(answering(b"HTTP/1.1 200 OK\r\n", hang=True)) as port:
        probe = replace(HTTP, timeout_ms=100)
        assert await attempt(probe, "127.0.0.1", port) == ("no answer within 100 ms", "silent")


@pytest.mark.parametrize("kind", ["tcp", "http"])
async def test_a_pause_of_ours_is_nobodys_silence(kind):
    """A host so busy that this process got no CPU for longer than the time-out: the answer and the time's end come together."""
    pause = 0.3
    async with serving(answering(b"HTTP/1.1 200 OK\r\n\r\n")) as port:
        for after in (0.0, 0.01, 0.05):
            asyncio.get_running_loop().call_later(after, time.sleep, pause)
            assert await attempt(replace(TCP, kind=kind, timeout_ms=100), "127.0.0.1", port) == WELL


async def test_a_host_without_sockets_learns_nothing_of_backends():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with serving(answering(b"")) as port:
        used = [os.dup(0)]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (used[0] + 1, hard))
            found = await attempt(TCP, "127.0.0.1", port)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            os.close(used[0])
    assert found.kind == "ours"
    told = []
    prober = Prober(told.append)
    prober._verdicts[FAST] = verdict = Verdict(is_up=True)
    for _ in range(10):
        prober._judge(FAST, found)
    assert (told, verdict.is_up, verdict.count) == ([], True, 0)


@LOOPBACK
@pytest.mark.parametrize(
    ("answer", "change", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", {}, ""),
        (b"HTTP/1.0 204 \r\n\r\n", {}, ""),
        (b"HTTP/1.1 503 Away\r\nContent-Length: 0\r\n\r\n", {}, "status 503"),
        (b"HTTP/1.1 503 Away\r\n\r\n", {"expected_status_first": 500, "expected_status_last": 599}, ""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nall ready", {"expected_body": "ready"}, ""),
        (b"HTTP/1.1 200 OK\r\n\r\nall ready", {"expected_body": "ready"}, ""),
        (CHUNKED + b"4\r\nall \r\n5\r\nready\r\n0\r\n\r\n", {"expected_body": "all ready"}, ""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbusy", {"expected_body": "ready"}, "the body is not the expected one"),
        (b"SSH-2.0-x\r\n\r\n", {}, "not HTTP: b'SSH-2.0-x'"),
        (b"x" * (1 << 17) + b"\r\n\r\n", {}, None),
        (CHUNKED + b"zz\r\n", {"expected_body": "a"}, None),
    ],
)  # fmt: skip
async def test_http(address, answer, change, reason):
    async with serving(answering(answer), address) as port:
        found = (await attempt(replace(HTTP, **change), address, port)).reason
    assert found if reason is None else found == reason


async def test_an_http_request_says_what_the_probe_wants():
    seen = asyncio.get_running_loop().create_future()

    async def handle(reader, writer):
        seen.set_result(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")

    async with serving(handle) as port:
        await attempt(replace(HTTP, path="/ready?deep=1", host="api.example"), "127.0.0.1", port)
    assert (await seen).startswith(b"GET /ready?deep=1 HTTP/1.1\r\nHost: api.example\r\n")


@pytest.fixture
def certificate(tmp_path):
    return make_certificate(tmp_path)


def make_certificate(directory):
    """A self-signed one for `api.example` and 127.0.0.1: a server's context and the file to trust."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "api.example")])
    now = dt.datetime.now(dt.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("api.example"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + dt.timedelta(days=1))
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = directory / "certificate.pem"
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    pem.write_bytes(made.public_bytes(serialization.Encoding.PEM) + secret)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    return context, pem


async def test_https_with_and_without_verification(certificate, monkeypatch):
    context, pem = certificate
    probe = replace(HTTP, kind="https", timeout_ms=5000)
    trusting = replace(probe, is_tls_verified=True)
    tls.cache_clear()
    async with serving(answering(b"HTTP/1.1 200 OK\r\n\r\n"), context=context) as port:
        assert await attempt(probe, "127.0.0.1", port) == WELL
        assert (await attempt(trusting, "127.0.0.1", port)).reason.startswith("TLS: CERTIFICATE_VERIFY_FAILED")
        monkeypatch.setenv("SSL_CERT_FILE", str(pem))
        tls.cache_clear()
        assert await attempt(trusting, "127.0.0.1", port) == WELL
        assert await attempt(replace(trusting, host="api.example"), "127.0.0.1", port) == WELL
        assert (await attempt(replace(trusting, host="other.example"), "127.0.0.1", port)).reason.startswith("TLS: ")
    tls.cache_clear()


def health(status: int | None = 1, grpc_status: str = "0"):
    """A gRPC server; it answers SERVING (or `status`) when asked for the service `bedplate.Test` or for none."""

    async def handle(reader, writer):
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        connection.initiate_connection()
        writer.write(connection.data_to_send())
        headers, body = {}, b""
        while data := await reader.read(1 << 16):
            for event in connection.receive_data(data):
                if isinstance(event, h2.events.RequestReceived):
                    headers = dict(event.headers)
                elif isinstance(event, h2.events.DataReceived):
                    body += event.data
                elif isinstance(event, h2.events.StreamEnded):
                    assert (headers[":path"], headers["content-type"]) == ("/grpc.health.v1.Health/Check", "application/grpc")
                    known = body in (b"\0\0\0\0\0", b"\0\0\0\0\x0f\x0a\x0dbedplate.Test")
                    fields = [("grpc-status", grpc_status if known else "5")]
                    if status is None or not known:
                        connection.send_headers(1, [(":status", "200"), *fields], end_stream=True)
                    else:
                        connection.send_headers(1, [(":status", "200"), ("content-type", "application/grpc")])
                        connection.send_data(1, b"\0\0\0\0\2\x08" + bytes([status]))
                        connection.send_headers(1, fields, end_stream=True)
            writer.write(connection.data_to_send())
            await writer.drain()

    return handle


@LOOPBACK
@pytest.mark.parametrize(
    ("server", "service", "reason"),
    [
        (health(), "", ""),
        (health(), "bedplate.Test", ""),
        (health(), "bedplate.Else", "gRPC status NOT_FOUND"),
        (health(2), "", "NOT_SERVING"),
        (health(None, "12"), "", "gRPC status UNIMPLEMENTED"),
        (answering(b"HTTP/1.1 400 Bad\r\n\r\n"), "", None),
    ],
)
async def test_grpc(address, server, service, reason):
    async with serving(server, address) as port:
        found = (await attempt(replace(GRPC, service=service), address, port)).reason
    assert found if reason is None else found == reason


def test_nothing_foreign_is_imported_before_a_grpc_check():
    words = (
        "import sys, hostagent.probes.prober, hostagent.probes.grpc; print([m for m in ('h2', 'hpack') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", words], check=True, capture_output=True, text=True).stdout.strip() == "[]"


class Scripted:
    """Attempts that end as the test says; `made` counts them."""

    def __init__(self) -> None:
        self.finding, self.made = WELL, 0

    async def __call__(self, probe, address, port):
        self.made += 1
        return self.finding


AWAY = Finding("away", "silent")
FAST = Target(address="192.0.2.1", port=80, probe=replace(TCP, interval_ms=5))


async def test_rise_and_fall_are_counted_in_a_row_and_told_once():
    script, told = Scripted(), []
    prober = Prober(lambda target: told.append(prober.verdict(target).is_up), attempt=script)
    prober.want("a", [FAST])
    assert prober.verdict(FAST).is_up is None

    async def made(count):
        before = script.made
        assert await until(lambda: _true(script.made >= before + count), seconds=10)

    await made(6)
    assert told == [True]
    script.finding = AWAY
    await made(6)
    assert (told, prober.verdict(FAST).last) == ([True, False], AWAY)
    prober.close()


async def _true(value):
    return value


@pytest.mark.parametrize(("rise", "fall"), [(1, 1), (2, 3), (4, 2)])
def test_what_decides(rise, fall):
    """By the judgement alone: no clock is needed to see when it turns."""
    told = []
    target = replace(FAST, probe=replace(TCP, rise=rise, fall=fall))
    prober = Prober(lambda target: told.append(prober.verdict(target).is_up))
    prober._verdicts[target] = verdict = prober.verdict(target)
    for _ in range(rise - 1):
        prober._judge(target, WELL)
    assert told == []
    prober._judge(target, WELL)
    assert told == [True]
    for _ in range(fall - 1):
        prober._judge(target, AWAY)
    prober._judge(target, WELL)
    for _ in range(fall - 1):
        prober._judge(target, AWAY)
    assert told == [True], "a good answer in between starts the count again"
    prober._judge(target, AWAY)
    assert told == [True, False]
    assert verdict.last == AWAY


async def test_one_check_for_many_services():
    script = Scripted()
    prober = Prober(lambda target: None, attempt=script)
    for number in range(50):
        prober.want(f"lb_{number}", [FAST])
    assert prober.targets == 1
    assert prober.cost_per_second() == cost_per_second([FAST]) == 200
    for number in range(49):
        prober.want(f"lb_{number}", [])
    assert prober.targets == 1
    prober.want("lb_49", [])
    assert (prober.targets, prober._timers) == (0, {})
    prober.close()


async def test_an_assumed_backend_is_up_until_it_falls():
    script, told = Scripted(), []
    script.finding = AWAY
    prober = Prober(lambda target: told.append(prober.verdict(target).is_up), attempt=script)
    prober.want("a", [FAST], assume_up=True)
    assert prober.verdict(FAST).is_up is True
    assert await until(lambda: _true(bool(told)), seconds=10)
    assert (told, script.made >= FAST.probe.fall) == ([False], True)
    prober.close()


async def test_who_is_refused_is_asked_again_soon_and_who_is_silent_is_not():
    """Three refusals of a check that is made each minute are no three minutes."""
    slow = Target(address="192.0.2.1", port=80, probe=replace(TCP, interval_ms=60_000, fall=3))
    for kind in ("refused", "silent"):
        script, told = Scripted(), []
        script.finding = Finding("away", kind)
        prober = Prober(told.append, attempt=script)
        prober.want("a", [slow], assume_up=True)
        assert await until(lambda script=script: _true(script.made > 0), seconds=10)
        assert await until(lambda told=told: _true(bool(told)), seconds=2) is (kind == "refused")
        assert script.made == (3 if kind == "refused" else 1)
        prober.close()
