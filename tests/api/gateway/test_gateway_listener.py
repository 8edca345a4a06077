"""The gateway's listener: TLS that is renewed in place, and refusals at the start that say why."""

from __future__ import annotations

import asyncio
import os
import ssl
import sys
from pathlib import Path

from controlplane.cli.certificates import Authority
from controlplane.gateway.server import listening
from controlplane.settings import TlsSettings
from tests.api.gateway.mock_engine import DONE, delta, usage_event

STREAM = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def write(authority: Authority, directory: Path) -> TlsSettings:
    issued = authority.issue(["127.0.0.1"])
    tls = TlsSettings(certificate=directory / "tls.crt", key=directory / "tls.key")
    assert tls.certificate
    assert tls.key
    for path, content in ((tls.certificate, issued.certificate_pem), (tls.key, issued.key_pem)):
        partial = path.with_suffix(".new")
        partial.write_bytes(content)
        partial.rename(path)
    return tls


async def serial_of(url: str, trusted: ssl.SSLContext) -> str:
    host, _, port = url.removeprefix("https://").rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=trusted)
    serial = writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
    writer.close()
    await writer.wait_closed()
    return serial


async def test_tls_is_renewed_without_cutting_a_stream(gateway_settings, fleet, engine, http, tmp_path) -> None:
    authority = Authority.make("test")
    tls = write(authority, tmp_path)
    trusted = ssl.create_default_context(cadata=authority.certificate_pem.decode())
    key = await fleet.key()
    await fleet.model("chat", engine.url)
    go_on = asyncio.Event()

    async def answer(seen, peer) -> None:
        await peer.open_stream()
        await peer.events(delta("one"))
        await go_on.wait()
        await peer.events(delta(" two"), usage_event(), DONE)
        await peer.end()

    engine.answer = answer
    settings = gateway_settings.model_copy(update={"gateway": gateway_settings.gateway.model_copy(update={"tls": tls})})
    async with listening(settings) as (_, server, url):
        assert url.startswith("https://")
        first = await serial_of(url, trusted)
        headers = {"authorization": f"Bearer {key}"}
        async with http.post(f"{url}/v1/chat/completions", json=STREAM, headers=headers, ssl=trusted) as reply:
            assert await reply.content.readany() == delta("one")
            write(authority, tmp_path)
            async with asyncio.timeout(10):
                while await serial_of(url, trusted) == first:
                    await asyncio.sleep(0.2)
            go_on.set()
            assert (await reply.read()).endswith(DONE)
        server.should_exit = True


async def test_two_of_one_name_are_refused(gateway, gateway_settings) -> None:
    """A second process on the same journal ends at once and says why."""
    environment = {
        **os.environ,
        "BEDPLATE_STATE_DIR": str(gateway_settings.state_dir),
        "BEDPLATE_DATABASE__URL": gateway_settings.database.url,
        "BEDPLATE_GATEWAY__LISTEN": "127.0.0.1:0",
    }
    argv = [sys.executable, "-m", "controlplane.gateway"]
    child = await asyncio.create_subprocess_exec(*argv, env=environment, stderr=asyncio.subprocess.PIPE)
    _, said = await child.communicate()
    assert child.returncode == 1
    assert b"in use by another gateway" in said
    assert gateway.url
