"""Hosts that answer in the same process, for tests. The one rule: a command nobody scripted fails the test.

`FakeLinks.add(host_id, answer)` takes the function that plays the agent: a Request in, an Answer out. The test fixture
`fake_host` passes the real agent's own dispatch with fake drivers; `Script` plays back fixed answers.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from controlplane.remote.link import AgentError, Events, HostKeyChanged, HostUnreachable, KeyRefused, Stream
from controlplane.remote.typed import TypedCalls
from hostagent.protocol import codec, frames
from hostagent.protocol.frames import Answer, Request
from hostagent.protocol.verbs import ANSWER, BODY, Cursor, StreamRequest

AnswerFunction = Callable[[Request], Awaitable[Answer]]
UploadFunction = Callable[[str, bytes], Awaitable[None]]
StreamFunction = Callable[[str, StreamRequest], Stream | Awaitable[Stream]]
"""Opens a stream to a host; raises what the agent would."""


class UnscriptedCommand(AssertionError):
    """A program said something to a host that the test did not foresee."""


class Script:
    """Fixed answers by verb, each used once in order, or for ever with `repeat`."""

    def __init__(self) -> None:
        self._answers: dict[str, list[tuple[object, bool]]] = {}
        self.requests: list[Request] = []

    def on(self, verb: str, answer: object, *, repeat: bool = False) -> Script:
        """`answer`: a dataclass of ANSWER[verb], or an AgentError."""
        self._answers.setdefault(verb, []).append((answer, repeat))
        return self

    async def __call__(self, request: Request) -> Answer:
        self.requests.append(request)
        planned = self._answers.get(request.verb)
        if not planned:
            raise UnscriptedCommand(f"{request.verb} {request.body}")
        answer, repeat = planned[0]
        if not repeat:
            planned.pop(0)
        if isinstance(answer, AgentError):
            return Answer(id=request.id, error=answer)
        return Answer(id=request.id, body=codec.encode(answer))


class FakeLinks(TypedCalls):
    """An implementation of HostLinks. Everything passes through the wire's own encoding, so what would not fit fails here."""

    def __init__(self) -> None:
        self._hosts: dict[str, AnswerFunction] = {}
        self._uploads: dict[str, UploadFunction] = {}
        self._unreachable: dict[str, HostUnreachable | HostKeyChanged] = {}
        self._ids = 0
        self.refused = 0
        self.calls: list[tuple[str, str, object]] = []
        self.stream: StreamFunction | None = None

    def add(self, host_id: str, answer: AnswerFunction, upload: UploadFunction | None = None) -> None:
        self._hosts[host_id] = answer
        if upload is not None:
            self._uploads[host_id] = upload

    def cut(self, host_id: str, detail: str = "connection refused") -> None:
        """From now on the host cannot be reached, until `mend`."""
        self._unreachable[host_id] = HostUnreachable(host_id, detail)

    def lock_out(self, host_id: str) -> None:
        """From now on the host answers and refuses the key, until `mend`: its agent was taken off."""
        self._unreachable[host_id] = KeyRefused(host_id, "the key is refused")

    def change_key(self, host_id: str) -> None:
        """From now on the host shows another key than the pinned one, until `mend`."""
        self._unreachable[host_id] = HostKeyChanged(host_id, "SHA256:pinned", "SHA256:other")

    def mend(self, host_id: str) -> None:
        self._unreachable.pop(host_id, None)

    async def call(self, host_id: str, verb: str, body: object, *, deadline_seconds: float = 30.0) -> Any:
        answer_function = self._reach(host_id)
        self.calls.append((host_id, verb, body))
        self._ids += 1
        request = Request(id=self._ids, verb=verb, deadline_ms=int(deadline_seconds * 1000), body=codec.encode(body))
        frame = frames.decode(frames.encode(request))
        assert isinstance(frame, Request)
        codec.decode(BODY[verb], frame.body)
        try:
            async with asyncio.timeout(deadline_seconds):
                answer = frames.decode(frames.encode(await answer_function(frame)))
        except TimeoutError:
            raise HostUnreachable(host_id, f"no answer to {verb} within {deadline_seconds} s") from None
        assert isinstance(answer, Answer)
        if answer.error is not None:
            raise answer.error
        return codec.decode(ANSWER[verb], answer.body)

    async def upload(self, host_id: str, path: Path, sha256: str, *, deadline_seconds: float = 3600.0) -> None:
        self._reach(host_id)
        del deadline_seconds
        content = await asyncio.to_thread(path.read_bytes)
        self.calls.append((host_id, "upload", sha256))
        if hashlib.sha256(content).hexdigest() != sha256:
            raise AgentError("upload.digest_mismatch", "the bytes do not match the digest", retryable=False)
        if host_id not in self._uploads:
            raise UnscriptedCommand(f"upload of {sha256}")
        await self._uploads[host_id](sha256, content)

    async def open_stream(self, host_id: str, request: StreamRequest, *, deadline_seconds: float = 30.0) -> Stream:
        del deadline_seconds
        self._reach(host_id)
        if self.stream is None:
            raise UnscriptedCommand(f"stream {request}")
        opened = self.stream(host_id, request)
        return await opened if isinstance(opened, Awaitable) else opened

    async def subscribe(self, host_id: str, cursor: Cursor, *, deadline_seconds: float = 30.0) -> Events:
        del deadline_seconds
        self._reach(host_id)
        raise UnscriptedCommand(f"subscribe {cursor}")

    async def forget(self, host_id: str) -> None:
        del host_id

    async def close(self) -> None:
        pass

    def _reach(self, host_id: str) -> AnswerFunction:
        if host_id in self._unreachable:
            self.refused += 1
            known = self._unreachable[host_id]
            if isinstance(known, HostKeyChanged):
                raise HostKeyChanged(host_id, known.expected, known.found)
            raise type(known)(host_id, known.detail)
        if host_id not in self._hosts:
            raise HostUnreachable(host_id, "no such host in this test")
        return self._hosts[host_id]
