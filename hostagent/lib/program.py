"""Running programs. The one rule: constant argv, a deadline, what varies or is secret goes in by stdin or a descriptor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hostagent.protocol.errors import AgentError

_TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    returncode: int
    stdout: bytes
    stderr: bytes


async def run(
    *argv: str,
    stdin: bytes | Iterable[bytes] = b"",
    deadline_seconds: float = 30.0,
    pass_fds: tuple[int, ...] = (),
    check: bool = True,
    uid: int | None = None,
) -> Finished:
    """Runs in a session of its own with a minimal environment; the whole session is killed at the deadline or on cancel.

    `stdin` in pieces is made as the program reads it. `uid`: whom it runs as, with no other group than that one.
    Many parameters, because each is a right or a limit of the program. Long, because the call takes a line for each.
    Raises AgentError `program.missing` (not retryable), `program.timed_out`, and with `check` `program.failed`.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=pass_fds,
            start_new_session=True,
            env=minimal_environment(),
            user=uid,
            group=uid,
            extra_groups=None if uid is None else (),
        )
    except FileNotFoundError:
        raise AgentError("program.missing", f"{argv[0]} is not installed", retryable=False, program=argv[0]) from None
    try:
        async with asyncio.timeout(deadline_seconds):
            pieces = (stdin,) if isinstance(stdin, bytes) else stdin
            (stdout, stderr), _ = await asyncio.gather(process.communicate(), _feed(process, pieces))
    except TimeoutError:
        raise AgentError("program.timed_out", f"{argv[0]} took over {deadline_seconds} s", program=argv[0]) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    assert process.returncode is not None
    finished = Finished(returncode=process.returncode, stdout=stdout, stderr=stderr)
    if check and finished.returncode != 0:
        raise _failure(argv[0], finished)
    return finished


async def _feed(process: asyncio.subprocess.Process, pieces: Iterable[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # how it ended says more
        for piece in pieces:
            process.stdin.write(piece)
            await process.stdin.drain()
    process.stdin.close()


@contextlib.contextmanager
def secret_input(content: bytes, *, uid: int = -1) -> Iterator[int]:
    """A descriptor from which a program reads `content` (`fd:N`, `/dev/fd/N`), for what may stand in no argument,
    environment or file. `uid` may open it by its name. At most a pipe's 64 KiB.
    """
    reader, writer = os.pipe()
    try:
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(content)
        if uid >= 0:
            os.fchown(reader, uid, -1)
        yield reader
    finally:
        os.close(reader)


def _failure(program: str, finished: Finished) -> AgentError:
    tail = finished.stderr[-_TAIL_BYTES:].decode(errors="replace").strip()
    words = f"{program} ended with {finished.returncode}: {tail}"
    return AgentError("program.failed", words, program=program, returncode=finished.returncode)


def minimal_environment() -> dict[str, str]:
    return {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/"}
