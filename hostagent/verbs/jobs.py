"""Work on objects that may outlast a request. The one rule: one job an object at a time, whoever asked for it.

A finished result waits for whoever asks next about the same action and generation, and is handed out once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from hostagent.protocol.errors import AgentError
from hostagent.protocol.results import Failed, Running, Succeeded
from hostagent.protocol.wanted import Generation
from hostagent.verbs.documents import Key
from hostagent.verbs.eventlog import EventLog

Result = Running | Succeeded | Failed
Action = Literal["ensure", "purge"]
MAX_JOBS = 8

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """`step` is the word a person reads while it runs; work sets it."""

    key: Key
    action: Action
    generation: Generation
    step: str = "waiting"
    is_awaited: bool = False
    task: asyncio.Task[Result] = field(init=False)


Work = Callable[[Job], Awaitable[Result]]


class Jobs:
    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._running: dict[Key, Job] = {}
        self._finished: dict[Key, tuple[Action, Generation, Result]] = {}
        self._aside: dict[Key, asyncio.Future[None]] = {}
        self._slots = asyncio.Semaphore(MAX_JOBS)
        self.on_finish: Callable[[Job, Result], None] | None = None

    def current(self, key: Key) -> Job | None:
        return self._running.get(key)

    def start(self, key: Key, action: Action, generation: Generation, work: Work) -> Job:
        """The caller has made sure that none runs for this object."""
        assert key not in self._running, f"two jobs on {key}"
        job = Job(key=key, action=action, generation=generation)
        self._finished.pop(key, None)
        self._running[key] = job
        job.task = asyncio.create_task(self._run(job, work), name=f"{action} {key[0]} {key[1]}")
        return job

    async def wait(self, job: Job, seconds: float) -> Result:
        """Its result when it ends within `seconds`, else Running; its end is then an event."""
        done, _ = await asyncio.wait({job.task}, timeout=seconds)
        if not done:
            job.is_awaited = True
            return Running(step=job.step)
        if job.task.cancelled():
            return Running(step="starting again")
        return job.task.result()

    def take(self, key: Key, action: Action, generation: Generation) -> Result | None:
        found = self._finished.get(key)
        if found is None or found[:2] != (action, generation):
            return None
        del self._finished[key]
        return found[2]

    async def aside(self, key: Key, work: Callable[[], Awaitable[None]], *, seconds: float, done: Callable[[], None]) -> bool:
        """Work that may take hours and must not hold a place among the jobs; asked for again it goes on. True: it has ended
        within `seconds`; its error is raised once. `done` is told when nobody waited any more.
        """
        task = self._aside.get(key)
        if task is None:
            task = self._aside[key] = asyncio.ensure_future(work())
            task.add_done_callback(lambda _task: done())
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            return False
        del self._aside[key]
        task.result()
        return True

    async def cancel(self, key: Key) -> None:
        """Ends what runs on this object and waits until it has ended."""
        job = self._running.get(key)
        if job is not None:
            job.task.cancel()
            await asyncio.wait({job.task})
            if self._running.get(key) is job:  # it was cancelled before it began, so it could not take itself off
                del self._running[key]

    async def close(self) -> None:
        for key in list(self._running):
            await self.cancel(key)
        for task in self._aside.values():
            task.cancel()
        if self._aside:
            await asyncio.wait(self._aside.values())
        self._aside.clear()

    async def _run(self, job: Job, work: Work) -> Result:
        try:
            async with self._slots:
                job.step = job.action
                result = await work(job)
        except AgentError as error:
            result = Failed(code=error.code, message=error.message, retryable=error.retryable, context=error.context)
        except Exception as error:
            logger.exception("%s of %s %s", job.action, *job.key)
            result = Failed(code="agent.bug", message=f"{type(error).__name__}: {error}", retryable=True)
        finally:
            if self._running.get(job.key) is job:
                del self._running[job.key]
        if job.is_awaited:
            self._finished[job.key] = (job.action, job.generation, result)
            self._announce(job, result)
        if self.on_finish is not None:
            self.on_finish(job, result)
        return result

    def _announce(self, job: Job, result: Result) -> None:
        self._events.emit(
            "object.settled",
            kind=job.key[0],
            id=job.key[1],
            action=job.action,
            epoch=job.generation.epoch,
            number=job.generation.number,
            result=result.kind,
            code=result.code if isinstance(result, Failed) else "",
        )
