"""The links to hosts through a real sshd on a port of its own, with the forced command and the agent behind it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import asyncssh
import pytest

from controlplane.remote.access import Access
from controlplane.remote.link import AgentError, HostKeyChanged, HostUnreachable
from controlplane.remote.ssh import SshLinks
from hostagent.protocol.results import Running, Succeeded
from hostagent.protocol.verbs import Cursor, Nothing, StreamRequest
from tests.agent.conftest import DEADLINE_SECONDS, Served
from tests.agent.sshd import Sshd
from tests.agent.test_serve import ONE, bare_vm, image_of

pytestmark = pytest.mark.caps("sshd")
HOST = "host_1"


class OneHost:
    """A directory of one host whose entry a test may change."""

    def __init__(self, access: Access) -> None:
        self.entry = access
        self.asked = 0

    async def access(self, host_id: str) -> Access:
        self.asked += 1
        return self.entry


@pytest.fixture
async def directory(sshd: Sshd) -> OneHost:
    return OneHost(sshd.access)


@pytest.fixture
async def links(directory: OneHost) -> AsyncIterator[SshLinks]:
    made = SshLinks(directory)
    yield made
    await made.close()


async def test_calls_are_typed_and_share_one_connection(links: SshLinks, directory: OneHost):
    facts, *observed = await asyncio.gather(links.facts(HOST), *(links.observe_host(HOST) for _ in range(20)))
    assert facts.schedulable_cpus == 1
    assert all(host.objects == () for host in observed)
    assert directory.asked == 1
    assert isinstance(await links.ensure(HOST, bare_vm()), Succeeded)
    seen = await links.observe(HOST, "vm", "vm_1")
    assert seen is not None
    assert seen.state == "running"
    assert isinstance(await links.purge(HOST, "vm", "vm_1", ONE), Succeeded)


async def test_the_agents_errors_arrive_whole(links: SshLinks):
    with pytest.raises(AgentError) as caught:
        await links.ensure(HOST, replace(bare_vm(), driver="cloud_hypervisor"))
    assert (caught.value.code, caught.value.retryable) == ("vm.driver_missing", False)


async def test_another_host_key_sends_nothing(links: SshLinks, directory: OneHost, sshd: Sshd):
    other = asyncssh.generate_private_key("ssh-ed25519").get_fingerprint()
    directory.entry = replace(directory.entry, fingerprint=other)
    with pytest.raises(HostKeyChanged) as caught:
        await links.facts(HOST)
    assert (caught.value.expected, caught.value.found) == (other, sshd.host_key.get_fingerprint())


async def test_a_refused_key_and_a_closed_port_say_so(links: SshLinks, directory: OneHost, sshd: Sshd):
    good = directory.entry
    directory.entry = replace(good, private_key=asyncssh.generate_private_key("ssh-ed25519").export_private_key())
    with pytest.raises(HostUnreachable, match="refuses our key"):
        await links.facts(HOST)
    await links.forget(HOST)
    directory.entry = good
    sshd.stop()
    with pytest.raises(HostUnreachable, match="refused"):
        await links.facts(HOST)
    with pytest.raises(HostUnreachable, match="refused"):
        await links.facts(HOST)
    assert directory.asked == 2, "the second call did not knock again"
    await sshd.start()
    await links.forget(HOST)
    await links.facts(HOST)


async def test_an_agent_that_is_away_is_named_and_found_again(links: SshLinks, served: Served):
    await links.facts(HOST)
    await served.kill()
    with pytest.raises(HostUnreachable, match="agent"):
        await links.facts(HOST)
    await served.start()
    await links.facts(HOST)


async def test_a_deadline_is_kept(links: SshLinks):
    await links.observe_host(HOST)
    with pytest.raises(AgentError, match=r"deadline\.exceeded"):
        await links.call(HOST, "facts.observe", Nothing(), deadline_seconds=0.001)


async def test_an_upload_arrives_and_a_cut_one_goes_on(links: SshLinks, served: Served, tmp_path: Path):
    content = random.Random(1).randbytes(5_000_000)
    wanted = image_of(content)
    path = tmp_path / "disk.img"
    path.write_bytes(content)
    assert isinstance(await links.ensure(HOST, wanted), Running)
    file = wanted.files[0]
    stream = await links.open_stream(HOST, StreamRequest(kind="upload", sha256=file.sha256, size_bytes=file.size_bytes))
    await stream.write(content[:1_234_567])
    await stream.write_eof()
    assert b"upload.cut" in await stream.read_line()
    await stream.close()
    await links.upload(HOST, path, file.sha256)
    assert isinstance(await links.ensure(HOST, wanted), Succeeded)
    assert (served.paths.image_directory("img_1") / "disk.img").read_bytes() == content
    await links.upload(HOST, path, file.sha256)


async def test_wrong_bytes_are_refused(links: SshLinks, tmp_path: Path):
    wanted = image_of(b"right" * 100)
    await links.ensure(HOST, wanted)
    path = tmp_path / "wrong"
    path.write_bytes(b"wrong" * 100)
    with pytest.raises(AgentError) as caught:
        await links.upload(HOST, path, wanted.files[0].sha256)
    assert (caught.value.code, caught.value.retryable) == ("upload.digest_mismatch", False)


async def test_eight_channels_and_the_ninth_waits(links: SshLinks, served: Served):
    await links.ensure(HOST, bare_vm())
    served.paths.vm_log("vm_1").parent.mkdir(parents=True, exist_ok=True)
    served.paths.vm_log("vm_1").write_bytes(b"hello\n")
    request = StreamRequest(kind="log", id="vm_1", offset=100, follow=True)
    streams = [await links.open_stream(HOST, request) for _ in range(7)]
    assert await streams[0].read() == b"hello\n"
    with pytest.raises(HostUnreachable, match="not done within"):
        await links.open_stream(HOST, request, deadline_seconds=1)
    with served.paths.vm_log("vm_1").open("ab") as log:
        log.write(b"more\n")
    assert await streams[0].read() == b"more\n"
    await streams.pop().close()
    streams.append(await links.open_stream(HOST, request))
    for stream in streams:
        await stream.close()


async def test_events_arrive_and_a_broken_channel_says_so(links: SshLinks, served: Served):
    subscription = await links.subscribe(HOST, Cursor())
    await links.ensure(HOST, bare_vm())
    async with asyncio.timeout(DEADLINE_SECONDS):
        async for event in subscription:
            assert (event.event, event.body["id"]) == ("vm.changed", "vm_1")
            assert subscription.cursor == Cursor(log=event.log, seq=event.seq)
            break
        await served.kill()
        with pytest.raises(HostUnreachable):
            async for _ in subscription:
                pass
    await subscription.close()


async def test_the_key_never_touches_the_disk(links: SshLinks, sshd: Sshd, tmp_path: Path):
    await links.facts(HOST)
    secret = sshd.access.private_key.splitlines()[2]
    assert not any(secret in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert secret.decode() not in repr(sshd.access)
