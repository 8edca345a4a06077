"""`serve` and `dispatch` as processes: limits, cancel, deadlines, streams, events, kill -9, refusal of everything else."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hostagent.protocol import frames
from hostagent.protocol.errors import AgentError
from hostagent.protocol.results import Running, Succeeded
from hostagent.protocol.verbs import Cursor, Nothing, StreamRequest, Subject
from hostagent.protocol.wanted import FileWanted, Generation, ImageWanted, SeedWanted, VmWanted
from tests.agent.conftest import DEADLINE_SECONDS, Client, Served

ONE = Generation(epoch=1, number=1)


def bare_vm(vm_id: str = "vm_1", generation: Generation = ONE) -> VmWanted:
    return VmWanted(
        id=vm_id,
        generation=generation,
        driver="fake",
        vcpus=1,
        memory_bytes=1 << 28,
        image_id="",
        boot=None,
        disks=(),
        nics=(),
        seed=SeedWanted(hostname="one"),
    )


def image_of(content: bytes) -> ImageWanted:
    file = FileWanted(name="disk.img", sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))
    return ImageWanted(id="img_1", generation=ONE, purpose="guest", files=(file,))


async def upload(served: Served, client: Client, wanted: ImageWanted, content: bytes) -> dict[str, object] | None:
    """Sends `content` from the offset the host asks for; the closing line, or None when the channel was cut."""
    file = wanted.files[0]
    request = StreamRequest(kind="upload", sha256=file.sha256, size_bytes=file.size_bytes)
    ticket = await client.call("stream.open", request)
    process = await served.dispatch(f"stream {ticket.ticket}".encode())
    async with asyncio.timeout(DEADLINE_SECONDS):
        out, _ = await process.communicate(content[ticket.offset :])
    return json.loads(out) if out else None


async def test_facts_are_quick_and_respect_the_declared_share(served: Served):
    client = await served.client()
    facts = await client.call("facts.observe", Nothing())
    assert facts.schedulable_cpus == 1
    assert facts.schedulable_memory_bytes == 1 << 30
    assert facts.supervisor == "fake"
    assert facts.machine_drivers == ("fake",)


async def test_more_than_64_in_flight_are_answered_busy(served: Served):
    client = await served.client()
    await client.call("vm.ensure", bare_vm())
    content = bytes(100)
    await client.call("image.ensure", image_of(content))
    burst = b"".join(
        frames.encode(frames.Request(id=1000 + n, verb="facts.observe", deadline_ms=80_000, body={})) for n in range(80)
    )
    waiters = {1000 + n: asyncio.get_running_loop().create_future() for n in range(80)}
    client._waiting.update(waiters)
    await client.write(burst)
    async with asyncio.timeout(80):  # as many facts as that on a busy machine
        answers = await asyncio.gather(*waiters.values())
    codes = [answer.error.code if answer.error else "ok" for answer in answers]
    assert codes.count("busy") == 16
    assert codes.count("ok") == 64


async def test_a_long_line_ends_the_channel_and_nothing_else(served: Served):
    client = await served.client()
    with contextlib.suppress(ConnectionError):
        await client.write(b'{"id":1,"verb":"' + b"x" * (frames.MAX_LINE_BYTES + 10) + b'"}\n')
    async with asyncio.timeout(DEADLINE_SECONDS):
        await client.process.wait()
    assert [answer.error.code for answer in client.stray if answer.error] == ["frame.too_long"]
    assert (await (await served.client()).call("host.observe", Nothing())).objects == ()


async def test_unreadable_lines_are_answered(served: Served):
    client = await served.client()
    await client.write(b'nonsense\n[]\n{}\n{"id":-1,"verb":"x","deadline_ms":1}\n' + b"[" * 100_000 + b"\n")
    with pytest.raises(AgentError, match=r"verb\.unknown"):
        await client.call("facts.observe; reboot", Nothing()) if False else await _raw(client, "no.such")
    codes = [answer.error.code for answer in client.stray if answer.error]
    assert codes == ["frame.invalid"] * 5


async def _raw(client: Client, verb: str) -> None:
    answer = await (await client.send(verb, Nothing()))
    assert answer.error is not None
    raise answer.error


async def test_unknown_fields_are_refused_with_their_place(served: Served):
    client = await served.client()
    answer = await (await client.send("vm.observe", {"id": "vm_1", "extra": 1}))
    assert answer.error is not None
    assert (answer.error.code, answer.error.context["pointer"]) == ("request.invalid", "/extra")


async def test_a_deadline_passes(served: Served):
    client = await served.client()
    with pytest.raises(AgentError) as caught:
        await client.call("facts.observe", Nothing(), deadline_ms=1)
    assert (caught.value.code, caught.value.retryable) == ("deadline.exceeded", True)


async def test_cancel(served: Served):
    client = await served.client()
    waiter = await client.send("facts.observe", Nothing())
    await client.write(frames.encode(frames.Cancel(cancel=client._ids)))
    async with asyncio.timeout(DEADLINE_SECONDS):
        answer = await waiter
    assert answer.error is not None
    assert answer.error.code == "cancelled"
    await client.write(frames.encode(frames.Cancel(cancel=999)))
    await client.call("host.observe", Nothing())


async def test_an_upload_is_resumed_where_it_was_cut(served: Served):
    client = await served.client()
    content = random.Random(1).randbytes(3_000_000)
    wanted = image_of(content)
    outcome = await client.call("image.ensure", wanted)
    assert outcome.result == Running(step="upload", needs=(wanted.files[0].sha256,))
    assert await upload(served, client, wanted, content[:1_000_000]) is not None
    request = StreamRequest(kind="upload", sha256=wanted.files[0].sha256, size_bytes=len(content))
    assert (await client.call("stream.open", request)).offset == 1_000_000
    result = await upload(served, client, wanted, content)
    assert result is not None
    assert result["code"] == ""
    await settled(client, wanted)
    assert (served.paths.image_directory("img_1") / "disk.img").read_bytes() == content
    assert not list(served.paths.uploads.iterdir())


async def settled(client: Client, wanted: ImageWanted) -> None:
    outcome = await client.call("image.ensure", wanted)
    assert isinstance(outcome.result, Succeeded)


async def test_an_upload_cut_by_a_kill_goes_on_after_the_restart(served: Served):
    client = await served.client()
    content = random.Random(2).randbytes(2_000_000)
    wanted = image_of(content)
    await client.call("image.ensure", wanted)
    await upload(served, client, wanted, content[:700_000])
    await served.kill()
    await served.start()
    result = await upload(served, await served.client(), wanted, content)
    assert result is not None
    assert result["code"] == ""


async def test_wrong_bytes_never_get_the_name(served: Served):
    client = await served.client()
    content = random.Random(3).randbytes(500_000)
    wanted = image_of(content)
    await client.call("image.ensure", wanted)
    result = await upload(served, client, wanted, bytes(500_000))
    assert result is not None
    assert result["code"] == "upload.digest_mismatch"
    assert not (served.paths.blobs / wanted.files[0].sha256).exists()
    request = StreamRequest(kind="upload", sha256=wanted.files[0].sha256, size_bytes=len(content))
    assert (await client.call("stream.open", request)).offset == 0, "the next try starts afresh"


async def test_only_wanted_files_are_taken(served: Served):
    client = await served.client()
    with pytest.raises(AgentError, match=r"upload\.unwanted"):
        await client.call("stream.open", StreamRequest(kind="upload", sha256="a" * 64, size_bytes=10))


async def test_a_ticket_is_valid_once(served: Served):
    client = await served.client()
    content = b"x" * 1000
    wanted = image_of(content)
    await client.call("image.ensure", wanted)
    request = StreamRequest(kind="upload", sha256=wanted.files[0].sha256, size_bytes=1000)
    ticket = await client.call("stream.open", request)
    for expected in (True, False):
        process = await served.dispatch(f"stream {ticket.ticket}".encode())
        async with asyncio.timeout(DEADLINE_SECONDS):
            out, _ = await process.communicate(content)
        assert bool(out) is expected


async def test_random_commands_are_refused_and_run_nothing(served: Served, tmp_path):
    chance = random.Random(4)
    canary = tmp_path / "canary"
    touch = b"touch " + str(canary).encode()
    commands = [b"", b"sh", b"rpc ", b" rpc", b"rpc\n", b"RPC", b"stream", b"internal-sftp", b"scp -t /"]
    commands += [b"rpc; " + touch, b"$(" + touch + b")", b"bash -c '" + touch + b"'"]
    commands += [b"stream " + ticket for ticket in (b"g" * 32, b"0" * 31, b"0" * 32 + b"\n", b"0" * 33)]
    commands += [bytes(chance.randrange(1, 256) for _ in range(chance.randrange(1, 60))) for _ in range(8)]
    for command in commands:
        process = await served.dispatch(command)
        async with asyncio.timeout(DEADLINE_SECONDS):
            out, error = await process.communicate(b"id\n")
        assert (process.returncode, out) == (2, b""), command
        assert b"refused" in error
    assert not canary.exists()


async def test_random_bytes_on_the_channel_leave_the_agent_well(served: Served):
    chance = random.Random(5)
    for _ in range(5):
        process = await served.dispatch(b"rpc")
        async with asyncio.timeout(DEADLINE_SECONDS):
            await process.communicate(chance.randbytes(200_000))
    for _ in range(3):
        _, writer = await asyncio.open_unix_connection(served.paths.socket)
        writer.write(chance.randbytes(5000) + b"\n")
        writer.close()
    await (await served.client()).call("host.observe", Nothing())


async def test_dispatch_says_when_the_agent_is_away(served: Served):
    await served.kill()
    process = await served.dispatch(b"rpc")
    async with asyncio.timeout(DEADLINE_SECONDS):
        _, error = await process.communicate()
    assert process.returncode == 69
    assert b"not running" in error


async def test_a_second_agent_is_refused(served: Served):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hostagent", "serve", "--root", str(served.root),
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(DEADLINE_SECONDS):
        _, error = await process.communicate()
    assert process.returncode == 1
    assert b"another agent serves this host" in error
    await (await served.client()).call("host.observe", Nothing())


async def test_events_follow_the_cursor_and_a_restart_resets(served: Served):
    client = await served.client()
    start = await client.call("events.subscribe", Cursor())
    await client.call("vm.ensure", bare_vm())
    async with asyncio.timeout(DEADLINE_SECONDS):
        event = await client.events.get()
    assert (event.log, event.seq) == (start.log, start.seq + 1)
    late = await served.client()
    await late.call("events.subscribe", start)
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await late.events.get() == event, "nothing after the cursor is lost"
    await served.kill()
    await served.start()
    again = await served.client()
    await again.call("events.subscribe", Cursor(log=event.log, seq=event.seq))
    async with asyncio.timeout(DEADLINE_SECONDS):
        reset = await again.events.get()
    assert reset.event == "events.reset"
    assert reset.log != event.log


async def test_metrics_over_their_socket(served: Served):
    await (await served.client()).call("host.observe", Nothing())
    reader, writer = await asyncio.open_unix_connection(served.paths.metrics_socket)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(DEADLINE_SECONDS):
        body = (await reader.read()).decode()
    writer.close()
    assert 'bedplate_agent_verbs_total{verb="host.observe",result="ok"} 1' in body


async def test_serve_is_small_and_imports_nothing_foreign(served: Served):
    client = await served.client()
    await client.call("facts.observe", Nothing())
    await client.call("vm.ensure", bare_vm())
    assert served.process is not None
    status = Path(f"/proc/{served.process.pid}/status").read_text()
    resident = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024
    assert resident < 60 << 20, resident
    maps = Path(f"/proc/{served.process.pid}/maps").read_text()
    assert "site-packages" not in maps


@pytest.mark.parametrize("served", ["plain"], indirect=True)
async def test_machines_outlive_a_killed_agent_and_are_found_again(served: Served):
    client = await served.client()
    for number in range(3):
        await client.call("vm.ensure", bare_vm(f"vm_{number}"))
    pids = {f"vm_{n}": await pid_of(client, f"vm_{n}") for n in range(3)}
    await client.send("vm.ensure", bare_vm("vm_9"))
    await served.kill()
    for pid in pids.values():
        os.kill(pid, 0)
    await served.start()
    client = await served.client()
    for vm_id, pid in pids.items():
        assert await pid_of(client, vm_id) == pid, "left alone"
    assert isinstance((await client.call("vm.ensure", bare_vm("vm_9"))).result, Running | Succeeded)
    for vm_id in (*pids, "vm_9"):
        await purged(client, vm_id)


@pytest.mark.parametrize("served", ["plain"], indirect=True)
async def test_a_machine_killed_from_outside_comes_back_by_itself(served: Served):
    client = await served.client()
    await client.call("vm.ensure", bare_vm())
    await client.call("events.subscribe", Cursor())
    first = await pid_of(client, "vm_1")
    os.kill(first, 9)
    seen = []
    async with asyncio.timeout(DEADLINE_SECONDS):
        while "vm.exited" not in seen:
            seen.append((await client.events.get()).event)
        while (await client.events.get()).body.get("state") != "running":
            pass
    assert await pid_of(client, "vm_1") not in (first, None)
    await purged(client, "vm_1")


async def pid_of(client: Client, vm_id: str) -> int:
    observed = (await client.call("vm.observe", Subject(id=vm_id))).object
    assert observed is not None
    return observed.detail["pid"]


async def purged(client: Client, vm_id: str) -> None:
    from hostagent.protocol.wanted import Purge

    async with asyncio.timeout(DEADLINE_SECONDS):
        while isinstance((await client.call("vm.purge", Purge(id=vm_id, generation=ONE))).result, Running):
            pass


@pytest.mark.parametrize("served", ["plain"], indirect=True)
async def test_killed_at_any_moment_it_goes_on(served: Served):
    chance = random.Random(6)
    names = [f"vm_{number}" for number in range(6)]
    for name in names:
        client = await served.client()
        await client.send("vm.ensure", bare_vm(name))
        await asyncio.sleep(chance.uniform(0, 0.05))
        await served.kill()
        await served.start()
    client = await served.client()
    for name in names:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not isinstance((await client.call("vm.ensure", bare_vm(name))).result, Succeeded):
                pass
    objects = {item.id: item.state for item in (await client.call("host.observe", Nothing())).objects}
    assert objects == dict.fromkeys(names, "running")
    assert not [path for path in served.paths.state.rglob("*") if path.name.endswith(".partial")]
    for name in names:
        await purged(client, name)
    assert (await client.call("host.observe", Nothing())).objects == ()


@pytest.mark.caps("root")
@pytest.mark.parametrize("served", ["small"], indirect=True)
async def test_a_full_disk_is_said_and_survived(served: Served):
    client = await served.client()
    large = image_of(bytes(5 << 20))
    outcome = await client.call("image.ensure", large)
    assert (outcome.result.code, outcome.result.retryable) == ("disk.full", True)
    content = random.Random(7).randbytes(2 << 20)
    fits = replace(image_of(content), id="img_2")
    assert isinstance((await client.call("image.ensure", fits)).result, Running)
    filler = served.paths.state / "filler"
    with contextlib.suppress(OSError):
        filler.write_bytes(bytes(3 << 20))
    result = await upload(served, client, fits, content)
    assert result is not None
    assert result["code"] == "disk.full"
    with pytest.raises(AgentError, match=r"disk\.full"):
        await client.call("vm.ensure", bare_vm())
    filler.unlink()
    result = await upload(served, client, fits, content)
    assert result is not None
    assert result["code"] == ""
    assert isinstance((await client.call("vm.ensure", bare_vm())).result, Succeeded)


async def test_a_deadline_beyond_all_numbers_is_a_day(served: Served):
    client = await served.client()
    await client.call("host.observe", Nothing(), deadline_ms=10**400)
