"""The rules' two real drivers: a warm helper process with the nftables bindings, and the program `nft`, once a transaction.

The one rule: nft text goes in by stdin, one transaction at a time; whoever else writes rules in this network namespace is
met by the kernel's generation check, on which libnftables tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hostagent import version
from hostagent.drivers.network.nfchange import messages_of
from hostagent.drivers.network.nfelements import Unsupported
from hostagent.drivers.network.nfnetlink import NfTables
from hostagent.drivers.network.nfwatch import Watch
from hostagent.drivers.network.protocol import RuleChange, RulePlan, RulesObserved, RuleTraits
from hostagent.drivers.network.table import TABLE, render_change, render_removal, render_table, table_lines
from hostagent.lib import program
from hostagent.protocol.errors import AgentError

NFT = "/usr/sbin/nft"
PYTHON = "/usr/bin/python3"
BINDINGS = Path("/usr/lib/python3/dist-packages/nftables")
DEADLINE_SECONDS = 30.0
RIGHT = "\0bedplate-rules"
LARGE_BYTES = 256 << 10
LARGE_SECONDS = 120.0
ANSWER_LIMIT_BYTES = 256 << 20
_TAIL = 1000

logger = logging.getLogger(__name__)


class _Rules:
    """What both drivers share: everything but how a text reaches the kernel. One agent writes in a network namespace."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._kernel: NfTables | None = None
        self._watch: Watch | None = None
        self._right: socket.socket | None = None
        self._on_news: Callable[[], None] | None = None

    def render(self, plan: RulePlan) -> str:
        return render_table(plan)

    async def observe(self) -> RulesObserved | None:
        with _words():
            kernel = self._opened()
            return RulesObserved(generation=kernel.generation()) if kernel.has_table("inet", TABLE) else None

    async def apply(self, plan: RulePlan) -> RulesObserved:
        lines, head, size = table_lines(plan), list[str](), 0
        for line in lines:
            head.append(line)
            size += len(line)
            if size > LARGE_BYTES:
                return await self._written(lambda: _run_program(itertools.chain(head, lines)))
        return await self._write("".join(head))

    async def change(self, change: RuleChange) -> RulesObserved:
        return await self._write(render_change(change))

    async def read(self, words: str) -> str:
        async with self._lock:
            return await self._run(words)

    async def remove(self) -> None:
        await self._write(render_removal())

    async def disturbed(self) -> str | None:
        async with self._lock:
            return self._watch.foreign() if self._watch else None

    def on_news(self, tell: Callable[[], None]) -> None:
        self._on_news = tell
        if self._watch is not None:
            asyncio.get_running_loop().add_reader(self._watch.fileno(), tell)

    def counters(self) -> dict[str, int]:
        if self._kernel is None:
            return {}
        with contextlib.suppress(OSError):
            return {**self._kernel.counters("inet", TABLE), **self._kernel.counters("arp", TABLE)}
        return {}

    async def close(self) -> None:
        self._close_kernel()
        if self._watch is not None:
            asyncio.get_running_loop().remove_reader(self._watch.fileno())
            self._watch.close()
            self._watch = None
        if self._right is not None:
            self._right.close()
            self._right = None

    async def _write(self, text: str) -> RulesObserved:
        return await self._written(lambda: self._run(text))

    async def _written(self, write: Callable[[], Awaitable[str]]) -> RulesObserved:
        async with self._lock:
            with _words():
                kernel = self._opened()
                with self._writing(kernel):
                    await write()
                return RulesObserved(generation=kernel.generation())

    @contextlib.contextmanager
    def _writing(self, kernel: NfTables) -> Iterator[None]:
        """Raises AgentError `rules.taken` while another agent has the right to write here."""
        if self._right is None:
            self._right = _right_to_write()
        if self._watch is None:
            self._watch = Watch(TABLE, kernel.generation)
            if self._on_news is not None:
                self.on_news(self._on_news)
        with self._watch.writing():
            yield

    def _opened(self) -> NfTables:
        self._kernel = self._kernel or NfTables()
        return self._kernel

    def _close_kernel(self) -> None:
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None

    async def _run(self, text: str) -> str:
        raise NotImplementedError


class NftProgram(_Rules):
    traits = RuleTraits(name="nft", is_warm=False)

    async def _run(self, text: str) -> str:
        return await _run_program((text,))


class NftHelper(_Rules):
    """`deadline_seconds`: for one transaction; a helper that takes longer is killed, and the next call starts another."""

    traits = RuleTraits(name="nft_helper", is_warm=True)

    def __init__(self, *, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        super().__init__()
        self._deadline_seconds = deadline_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._ids = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def close(self) -> None:
        await super().close()
        await self._end()

    async def _run(self, text: str) -> str:
        if len(text) > LARGE_BYTES:  # what that takes of memory goes with the process
            return await _run_program((text,))
        try:
            async with asyncio.timeout(self._deadline_seconds):
                answer = await self._ask(text)
        except TimeoutError:
            await self._end()
            message = f"a transaction took over {self._deadline_seconds:g} s"
            raise AgentError("rules.timed_out", message) from None
        except asyncio.CancelledError:  # half a line may be in the pipe
            await self._end()
            raise
        except (ConnectionError, asyncio.IncompleteReadError, ValueError) as error:
            await self._end()
            raise AgentError("rules.helper_died", f"the rules' helper ended in a transaction: {error!r}") from error
        if answer["rc"] != 0:
            raise refused(answer["err"])
        return answer["out"]

    async def change(self, change: RuleChange) -> RulesObserved:
        """What can be said in the kernel's own words goes to it by the short way, everything else by nft."""
        try:
            requests = messages_of(change)
        except Unsupported:
            return await super().change(change)
        async with self._lock:
            with _words():
                kernel = self._opened()
                with self._writing(kernel):
                    kernel.batch(requests)
                return RulesObserved(generation=kernel.generation())

    async def _ask(self, text: str) -> dict[str, Any]:
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        self._ids += 1
        process.stdin.write(json.dumps({"id": self._ids, "text": text}).encode() + b"\n")
        await process.stdin.drain()
        answer = json.loads(await process.stdout.readuntil(b"\n"))
        if answer["id"] != self._ids:
            raise ConnectionError("an answer to another transaction")
        return answer

    @staticmethod
    async def _start() -> asyncio.subprocess.Process:
        archive = version.archive()
        source = [str(archive), "rules-helper"] if archive else [str(Path(__file__).with_name("nft_helper.py"))]
        return await asyncio.create_subprocess_exec(
            PYTHON,
            "-I",
            *source,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=sys.stderr.fileno() if _has_descriptor() else asyncio.subprocess.DEVNULL,
            start_new_session=True,
            env=program.minimal_environment(),
            limit=ANSWER_LIMIT_BYTES,
        )

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        await process.wait()


def best() -> NftHelper | NftProgram:
    """The warm helper where the distribution's bindings are installed, else the program."""
    return NftHelper() if BINDINGS.is_dir() and os.access(PYTHON, os.X_OK) else NftProgram()


@contextlib.contextmanager
def _words() -> Iterator[None]:
    """What the kernel answers to netlink, as AgentError `rules.refused`: also that it knows no nf_tables at all."""
    try:
        yield
    except OSError as error:
        raise AgentError("rules.refused", f"the kernel's nf_tables: {error}") from error


def _right_to_write() -> socket.socket:
    """An abstract socket's name exists once in a network namespace, and goes with the process that has it."""
    right = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        right.bind(RIGHT)
    except OSError as error:
        right.close()
        raise AgentError(
            "rules.taken",
            f"{_writer()} writes the rules of this network namespace, and two agents cannot: "
            "end it, or run one of the two in a network namespace of its own",
        ) from error
    return right


def _writer() -> str:
    """Who has the right to write, in words."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/thread-self/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
        inodes = {f"socket:[{line.split()[6]}]" for line in lines if line.endswith(f" @{RIGHT[1:]}")}
        for entry in Path("/proc").glob("[0-9]*/fd/*"):
            with contextlib.suppress(OSError):
                if str(entry.readlink()) in inodes:
                    process = entry.parent.parent
                    command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    return f"another agent (process {process.name}: {command[:_TAIL]})"
    return "another agent (which cannot be seen from here)"


async def _run_program(texts: Iterable[str]) -> str:
    try:
        pieces = (text.encode() for text in texts)
        done = await program.run(NFT, "-f", "-", stdin=pieces, deadline_seconds=LARGE_SECONDS, check=False)
    except AgentError as error:
        if error.code == "program.timed_out":
            raise AgentError("rules.timed_out", error.message) from error
        raise
    if done.returncode != 0:
        raise refused(done.stderr.decode(errors="replace"))
    return done.stdout.decode(errors="replace")


def refused(words: str) -> AgentError:
    return AgentError("rules.refused", f"nft: {words.strip()[-_TAIL:] or 'no reason given'}")


def _has_descriptor() -> bool:
    try:
        sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
