"""The search of one request for a replica: at once, after waiting, and again after a fault.

The one rule: a search that fails says what the last replica met, never that there was none when there was one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from controlplane.gateway import problem
from controlplane.gateway.call import Call
from controlplane.gateway.directory import RouteEntry, Target
from controlplane.gateway.retry import Fault, FaultKind
from controlplane.gateway.routing import Choice, Plan, Router
from controlplane.gateway.rule import DEFAULT, affinity_of, targets_of
from controlplane.gateway.waiting import BANDS, RoomIsFull

log = logging.getLogger(__name__)


class Search:
    """`rule` is the name of the route's rule that decided."""

    _plan: Plan

    def __init__(self, router: Router, call: Call, route: RouteEntry, body: bytes, *, is_stream: bool) -> None:
        self.rule = DEFAULT
        self._router = router
        self._call = call
        self._route = route
        self._body = body
        self._is_stream = is_stream
        self._budget = router.budget(route)
        self._counted = 0

    async def first(self) -> Choice:
        """Where to go first: at once, or after waiting behind those who came before. Raises Problem 429 or 503."""
        room, route = self._router.room, self._route
        self._budget.deposit()
        targets = self._look(route)
        waits_for = next((target for target in targets if target.can_wait_for), None)
        if waits_for is None or not room.count(waits_for.endpoint_id):
            if choice := self._plan.next():
                self._router.book.arrive(choice[0].endpoint_id)
                return choice
            if waits_for is None:
                raise problem.no_ready_replicas(route.name, is_starting=route.is_starting)
        return await self._wait(waits_for)

    async def _wait(self, target: Target) -> Choice:
        """In the waiting room of the target's endpoint until a replica is there and has a place."""
        router, endpoint_id = self._router, target.endpoint_id
        try:
            waiter = router.room.enter(endpoint_id, len(self._body), self._call.key.band if self._call.key else BANDS["normal"])
        except RoomIsFull as error:
            raise problem.queue_full() from error
        router.book.arrive(endpoint_id)
        queued = router.book.of(endpoint_id).queued
        queued.add(1, time.monotonic())
        if not target.replicas:
            router.book.urgent.set()
        try:
            async with asyncio.timeout(self._route.timeouts.queue):
                while True:
                    await waiter.called.wait()
                    waiter.called.clear()
                    if waiter.is_shed:
                        raise problem.overloaded(None, "its place in the queue went to a request of a higher band")
                    self._look(router.latest(self._route))
                    if choice := self._plan.next():
                        return choice
        except TimeoutError as error:
            raise problem.no_ready_replicas(self._route.name, is_starting=True) from error
        finally:
            queued.add(-1, time.monotonic())
            router.room.leave(endpoint_id, waiter)
            asyncio.get_running_loop().call_soon(router.call, endpoint_id)

    def _look(self, route: RouteEntry) -> Sequence[Target]:
        """Apply the rules and plan anew over the targets that they name."""
        tokens = estimate_prompt(self._body)
        self.rule, targets = targets_of(route, self._call, is_stream=self._is_stream, prompt_tokens=tokens)
        affinity = affinity_of(route, self._call, self._body)
        self._plan = self._router.plan(targets, affinity, time.monotonic())
        return targets

    async def another(self, fault: Fault) -> Choice:
        """Where to go after a fault; raises the fault's problem when this was all.

        Replicas that could not be connected to are no attempts of the policy: they saw nothing.
        """
        policy = self._route.retry
        log.warning("request %s: %s", self._call.request_id.decode(), fault.problem.log)
        if fault.kind is FaultKind.UNREACHED and (choice := self._plan.next(fault.kind)):
            return choice
        self._counted += 1
        if self._counted >= policy.max_attempts:
            raise fault.problem
        choice = None if fault.kind is FaultKind.UNREACHED else self._plan.next(fault.kind)
        if choice is None and policy.backoff_seconds and fault.kind is not FaultKind.FAILED:
            self._plan.again()
            choice = self._plan.next(fault.kind)
        if choice is None or not self._budget.withdraw():
            raise fault.problem
        await asyncio.sleep(policy.wait(self._counted))
        if not self._router.is_present(choice[1]) and (choice := self._plan.next(fault.kind)) is None:
            raise fault.problem  # it went while we waited
        return choice


def estimate_prompt(body: bytes) -> int:
    """Tokens of a prompt nobody has counted yet: four bytes a token."""
    return max(1, len(body) // 4)
