"""The real links: one multiplexed SSH connection a host, at most eight channels on it, the host key pinned.

The one rule: nothing is sent to a host whose key is not the pinned one, and a host that cannot be reached is not tried
again before its back-off is over: callers hear the last cause at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import asyncssh
from prometheus_client import Histogram

from controlplane.core.pace import Pace
from controlplane.remote.access import Access, Directory
from controlplane.remote.channel import ByteStream, RpcChannel, Subscription
from controlplane.remote.link import AgentError, HostKeyChanged, HostUnreachable, KeyRefused
from controlplane.remote.typed import TypedCalls
from hostagent.protocol import codec
from hostagent.protocol.frames import MAX_CHANNELS
from hostagent.protocol.verbs import Cursor, StreamRequest, StreamTicket, UploadResult

CONNECT_SECONDS = 15.0
KEEPALIVE_SECONDS = 10.0
KEEPALIVE_MISSES = 3
FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 15.0
UPLOAD_CHUNK_BYTES = 1 << 18

VERB_SECONDS = Histogram(
    "bedplate_host_verb_seconds",
    "Time until a host's agent answered, by verb and result.",
    ["verb", "result"],
    buckets=(0.005, 0.02, 0.1, 0.5, 1, 2, 5, 15, 60),
)


class _PinnedClient(asyncssh.SSHClient):
    """Accepts exactly one host key, and remembers what it was shown instead."""

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint
        self.shown = ""

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        del host, addr, port
        self.shown = key.get_fingerprint()
        return self.shown == self._fingerprint


class _Host:
    """The connection to one host and what hangs on it."""

    def __init__(self, host_id: str, directory: Directory) -> None:
        self.id = host_id
        self._directory = directory
        self._connecting: asyncio.Task[asyncssh.SSHClientConnection] | None = None
        self._connection: asyncssh.SSHClientConnection | None = None
        self._rpc: RpcChannel | None = None
        self._opening = asyncio.Lock()
        self._slots = asyncio.Semaphore(MAX_CHANNELS)
        self._failures = 0
        self._not_before = 0.0
        self._last_error: Exception | None = None

    async def rpc(self) -> RpcChannel:
        """The channel that all calls share, opened when there is none."""
        async with self._opening:
            if self._rpc is None or not self._rpc.is_open:
                self._rpc = await self.open_rpc()
            return self._rpc

    async def open_rpc(self) -> RpcChannel:
        writer, reader, stderr, release = await self._open("rpc")
        return RpcChannel(self.id, writer, reader, stderr, release)

    async def open_bytes(self, ticket: str) -> ByteStream:
        writer, reader, _, release = await self._open(f"stream {ticket}")
        return ByteStream(self.id, writer, reader, release)

    async def _open(self, command: str) -> tuple[Any, Any, Any, Callable[[], None]]:
        connection = await self._connected()
        await self._slots.acquire()
        release = _once(self._slots.release)
        try:
            writer, reader, stderr = await connection.open_session(command, encoding=None)
        except (OSError, asyncssh.Error) as error:
            release()
            if connection.is_closed():
                self._connection = None
            raise HostUnreachable(self.id, f"no channel: {error or type(error).__name__}") from error
        except BaseException:
            release()
            raise
        return writer, reader, stderr, release

    async def _connected(self) -> asyncssh.SSHClientConnection:
        if self._connection is not None and not self._connection.is_closed():
            return self._connection
        if self._connecting is None:
            if time.monotonic() < self._not_before and self._last_error is not None:
                raise self._again(self._last_error)
            self._connecting = asyncio.create_task(self._connect(), name=f"connect {self.id}")
            self._connecting.add_done_callback(self._note)
        return await asyncio.shield(self._connecting)

    def _note(self, task: asyncio.Task[asyncssh.SSHClientConnection]) -> None:
        self._connecting = None
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            self._connection, self._failures, self._last_error = task.result(), 0, None
            return
        self._failures += 1
        self._last_error = error if isinstance(error, Exception) else None
        delay = min(FIRST_DELAY_SECONDS * 2 ** min(self._failures - 1, 10), LONGEST_DELAY_SECONDS)
        self._not_before = time.monotonic() + delay * random.uniform(0.5, 1)  # noqa: S311 - spreads load, guards nothing

    def _again(self, error: Exception) -> Exception:
        if isinstance(error, HostUnreachable):
            return type(error)(self.id, error.detail)
        if isinstance(error, HostKeyChanged):
            return HostKeyChanged(self.id, error.expected, error.found)
        return HostUnreachable(self.id, str(error))

    async def _connect(self) -> asyncssh.SSHClientConnection:
        access = await self._directory.access(self.id)
        client = _PinnedClient(access.fingerprint)
        where = f"SSH at {access.address} port {access.port}"
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await _connect(access, client)
        except TimeoutError:
            raise HostUnreachable(self.id, f"{where} does not answer") from None
        except asyncssh.HostKeyNotVerifiable as error:
            raise HostKeyChanged(self.id, access.fingerprint, client.shown or "none") from error
        except asyncssh.PermissionDenied as error:
            raise KeyRefused(self.id, f"{where} refuses our key") from error
        except (OSError, asyncssh.Error, ValueError) as error:
            words = "the connection is refused" if isinstance(error, ConnectionRefusedError) else str(error)
            raise HostUnreachable(self.id, f"{where}: {words or type(error).__name__}") from error

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._rpc is not None:
            await self._rpc.close()
        if self._connection is not None:
            self._connection.abort()
            await self._connection.wait_closed()


async def _connect(access: Access, client: _PinnedClient) -> asyncssh.SSHClientConnection:
    return await asyncssh.connect(
        access.address,
        access.port,
        username=access.user,
        client_keys=[asyncssh.import_private_key(access.private_key)],
        client_factory=lambda: client,
        known_hosts=asyncssh.import_known_hosts(""),
        agent_path=None,
        config=None,
        preferred_auth="publickey",
        compression_algs=None,
        keepalive_interval=KEEPALIVE_SECONDS,
        keepalive_count_max=KEEPALIVE_MISSES,
    )


class SshLinks(TypedCalls):
    """HostLinks over SSH. Belongs to the event loop it is used in."""

    def __init__(self, directory: Directory, uploads: Pace | None = None) -> None:
        self._directory = directory
        self._uploads = uploads or Pace(0)
        self._hosts: dict[str, _Host] = {}

    async def call(self, host_id: str, verb: str, body: object, *, deadline_seconds: float = 30.0) -> Any:
        started, result = time.monotonic(), "ok"
        try:
            async with self._within(host_id, deadline_seconds + CONNECT_SECONDS):
                channel = await self._host(host_id).rpc()
            return await channel.call(verb, body, deadline_seconds)
        except AgentError as error:
            result = error.code
            raise
        except (HostUnreachable, HostKeyChanged):
            result = "unreachable"
            raise
        finally:
            VERB_SECONDS.labels(verb, result).observe(time.monotonic() - started)

    async def upload(self, host_id: str, path: Path, sha256: str, *, deadline_seconds: float = 3600.0) -> None:
        size_bytes = (await asyncio.to_thread(path.stat)).st_size
        request = StreamRequest(kind="upload", sha256=sha256, size_bytes=size_bytes)
        async with self._within(host_id, deadline_seconds):
            ticket: StreamTicket = await self.call(host_id, "stream.open", request)
            stream = await self._host(host_id).open_bytes(ticket.ticket)
            try:
                line = await _send_file(stream, path, ticket.offset, self._uploads)
            finally:
                await stream.close()
        if not line.endswith(b"\n"):
            raise HostUnreachable(host_id, "the upload was cut")
        result = codec.decode(UploadResult, json.loads(line))
        if result.code:
            retryable = result.code != "upload.digest_mismatch"
            raise AgentError(result.code, result.message, retryable=retryable, sha256=sha256)

    async def open_stream(self, host_id: str, request: StreamRequest, *, deadline_seconds: float = 30.0) -> ByteStream:
        async with self._within(host_id, deadline_seconds):
            ticket: StreamTicket = await self.call(host_id, "stream.open", request)
            return await self._host(host_id).open_bytes(ticket.ticket)

    async def subscribe(self, host_id: str, cursor: Cursor, *, deadline_seconds: float = 30.0) -> Subscription:
        async with self._within(host_id, deadline_seconds + CONNECT_SECONDS):
            channel = await self._host(host_id).open_rpc()
            try:
                found: Cursor = await channel.call("events.subscribe", cursor, deadline_seconds)
            except BaseException:
                await channel.close()
                raise
        return Subscription(channel, cursor if cursor.log else found)

    async def forget(self, host_id: str) -> None:
        host = self._hosts.pop(host_id, None)
        if host is not None:
            with contextlib.suppress(OSError, asyncssh.Error):
                await host.close()

    async def close(self) -> None:
        for host_id in list(self._hosts):
            await self.forget(host_id)

    def _host(self, host_id: str) -> _Host:
        return self._hosts.setdefault(host_id, _Host(host_id, self._directory))

    @contextlib.asynccontextmanager
    async def _within(self, host_id: str, seconds: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise HostUnreachable(host_id, f"not done within {seconds:g} s") from None


async def _send_file(stream: ByteStream, path: Path, offset: int, pace: Pace) -> bytes:
    """The line that the agent answers with, b"" when the channel was cut. The agent may answer before the end (disk full)."""
    answering = asyncio.create_task(stream.read_line())
    try:
        with path.open("rb") as file:
            file.seek(offset)
            while not answering.done() and (chunk := await asyncio.to_thread(file.read, UPLOAD_CHUNK_BYTES)):
                writing = asyncio.create_task(stream.write(chunk))
                await asyncio.wait({writing, answering}, return_when=asyncio.FIRST_COMPLETED)
                if not writing.done():
                    writing.cancel()
                with contextlib.suppress(asyncio.CancelledError, HostUnreachable):
                    await writing
                await pace.spend(len(chunk))
        return await answering
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)


def _once(function: Callable[[], None]) -> Callable[[], None]:
    pending = [function]

    def call() -> None:
        if pending:
            pending.pop()()

    return call
