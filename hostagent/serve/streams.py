"""Raw bytes in a channel of their own: console, log, tcp, upload. The one rule: nothing is read faster than it is passed on."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from hostagent.lib import files
from hostagent.protocol import codec
from hostagent.protocol.errors import AgentError
from hostagent.protocol.verbs import StreamRequest, UploadResult
from hostagent.protocol.wanted import VmWanted
from hostagent.verbs import vm
from hostagent.verbs.context import Agent

CHUNK_BYTES = 1 << 18
CONNECT_SECONDS = 10.0
FOLLOW_SECONDS = 0.25
SILENCE_SECONDS = 60.0


async def serve(agent: Agent, request: StreamRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry one stream to its end. An error is told only where the stream has a place for it (upload)."""
    with contextlib.suppress(ConnectionError):
        if request.kind == "upload":
            result = await _upload(agent, request, reader)
            writer.write(json.dumps(codec.encode(result)).encode() + b"\n")
            await writer.drain()
            return
        document = agent.documents.get("vm", request.id)
        if document is None:
            return
        if request.kind == "log":
            await _log(agent, document, request, reader, writer)
        else:
            await _connect(agent, document, request, reader, writer)


async def _connect(
    agent: Agent, document: VmWanted, request: StreamRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            if request.kind == "console":
                seen = await vm.driver_of(agent, document).observe(document.id)
                if seen is None or not seen.console_socket:
                    return
                far_reader, far_writer = await asyncio.open_unix_connection(seen.console_socket)
            else:
                address = document.nics[0].ipv4 or document.nics[0].ipv6
                far_reader, far_writer = await asyncio.open_connection(address, request.port)
    except (OSError, TimeoutError):
        return
    await _pump(reader, writer, far_reader, far_writer)


async def _pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Until the machine has said all. A client that has said all may be gone: then a silent machine ends it too."""
    heard = asyncio.Event()
    outward = asyncio.create_task(_copy(reader, far_writer))
    inward = asyncio.create_task(_copy(far_reader, writer, heard.set))
    try:
        await asyncio.wait({inward, outward}, return_when=asyncio.FIRST_COMPLETED)
        while not inward.done():
            heard.clear()
            await asyncio.wait({inward}, timeout=SILENCE_SECONDS)
            if not heard.is_set():
                break
    finally:
        for task in (outward, inward):
            task.cancel()
        await asyncio.gather(outward, inward, return_exceptions=True)
        far_writer.close()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, on_chunk: Callable[[], None] = lambda: None) -> None:
    with contextlib.suppress(ConnectionError):
        while chunk := await source.read(CHUNK_BYTES):
            on_chunk()
            sink.write(chunk)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()


async def _log(
    agent: Agent, document: VmWanted, request: StreamRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    seen = await vm.driver_of(agent, document).observe(document.id)
    path = Path(seen.log_path) if seen is not None and seen.log_path else agent.paths.vm_log(document.id)
    closed = asyncio.create_task(_until_closed(reader))
    try:
        position = max(_size(path) - request.offset, 0)
        while not closed.done():
            if _size(path) < position:
                position = 0  # the file was started anew
            chunk = await asyncio.to_thread(_read_at, path, position)
            position += len(chunk)
            if chunk:
                writer.write(chunk)
                await writer.drain()
            elif request.follow:
                await asyncio.wait({closed}, timeout=FOLLOW_SECONDS)
            else:
                return
    finally:
        closed.cancel()
        await asyncio.gather(closed, return_exceptions=True)


async def _until_closed(reader: asyncio.StreamReader) -> None:
    """A reader of a log has nothing to say; what it says is not kept."""
    while await reader.read(CHUNK_BYTES):
        pass


async def _upload(agent: Agent, request: StreamRequest, reader: asyncio.StreamReader) -> UploadResult:
    """One writer a file; a cut upload keeps what arrived; the file gets its name only with the right digest."""
    result = UploadResult(sha256=request.sha256, size_bytes=request.size_bytes)
    try:
        async with agent.uploads.hold(request.sha256):
            if not (agent.paths.blobs / request.sha256).exists():
                await _receive(agent, request, reader)
    except AgentError as error:
        return UploadResult(sha256=request.sha256, size_bytes=request.size_bytes, code=error.code, message=error.message)
    for image in agent.documents.all("image"):
        if any(file.sha256 == request.sha256 for file in image.files):
            agent.poke(("image", image.id))
    return result


async def _receive(agent: Agent, request: StreamRequest, reader: asyncio.StreamReader) -> None:
    partial = agent.paths.uploads / request.sha256
    partial.parent.mkdir(parents=True, exist_ok=True)
    agent.paths.blobs.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with files.disk_errors(partial):
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            position = await asyncio.to_thread(_digest_prefix, descriptor, digest, request.offset)
            while position < request.size_bytes:
                chunk = await _next_chunk(reader, request.size_bytes - position)
                if not chunk:
                    raise AgentError("upload.cut", f"{position} of {request.size_bytes} bytes arrived")
                await asyncio.to_thread(_append, descriptor, digest, chunk)
                position += len(chunk)
            await asyncio.to_thread(os.fsync, descriptor)
        finally:
            os.close(descriptor)
    if digest.hexdigest() != request.sha256:
        partial.unlink()
        raise AgentError("upload.digest_mismatch", f"what arrived is {digest.hexdigest()}", retryable=False)
    partial.chmod(0o644)
    partial.rename(agent.paths.blobs / request.sha256)
    files.sync_directory(agent.paths.blobs)


async def _next_chunk(reader: asyncio.StreamReader, left_bytes: int) -> bytes:
    """b"" also from a sender that fell silent: it must not keep the next one, on a new connection, from going on."""
    try:
        async with asyncio.timeout(SILENCE_SECONDS):
            return await reader.read(min(CHUNK_BYTES, left_bytes))
    except TimeoutError:
        return b""


def _digest_prefix(descriptor: int, digest: hashlib._Hash, length: int) -> int:
    """Cut the file to `length` (what the sender was told we have), feed it to the digest, return where to go on."""
    size = os.fstat(descriptor).st_size
    if size < length:
        raise AgentError("upload.offset", f"the host has {size} bytes, not {length}")
    os.ftruncate(descriptor, length)
    while chunk := os.read(descriptor, CHUNK_BYTES):
        digest.update(chunk)
    return length


def _append(descriptor: int, digest: hashlib._Hash, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[os.write(descriptor, view) :]
    digest.update(chunk)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _read_at(path: Path, position: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(position)
            return file.read(CHUNK_BYTES)
    except FileNotFoundError:
        return b""
