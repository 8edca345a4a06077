"""What this host wants in its table, kept equal with what the kernel has. The only writer of rules.

The one rule: parts are put, never rules; a part that is put replaces the one of its name, in one transaction together with
all that are put with it. Where the table is not what it should be (somebody flushed it, a transaction's end is unknown)
everything is written anew, again in one transaction.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from hostagent.drivers.network.protocol import RuleChange, RuleDriver, RulePart, RulePlan, RulesObserved, SetSpec
from hostagent.drivers.network.table import difference, filled_slots, without_flowtables
from hostagent.protocol.errors import AgentError

logger = logging.getLogger(__name__)


class Ruleset:
    """`generation`: of the kernel after our last transaction. `is_intact`: nothing says that the table is another than ours."""

    def __init__(self, driver: RuleDriver) -> None:
        self.driver = driver
        self.parts: dict[str, RulePart] = {}
        self.generation = 0
        self.is_intact = True
        self.disturbances = 0
        self._specs: dict[str, SetSpec] = {}
        self._filled: set[str] = set()
        self._lock = asyncio.Lock()
        self._is_open = False
        self._is_written = False  # whether the kernel has a table of ours

    async def start(self, parts: Mapping[str, RulePart]) -> None:
        """Write all of these instead of whatever is there. Until then `put` only remembers.

        Without any part, and with no table of an earlier agent's, nothing is written at all.
        """
        async with self._lock:
            self._is_open = True
            self._keep(parts)
            if self.parts or await self.driver.observe() is not None:
                await self._replace()

    async def put(self, parts: Mapping[str, RulePart | None], *, change: RuleChange | None = None) -> None:
        """In the kernel afterwards; None takes a part out. When this raises AgentError, the wanted parts are still these,
        and `repair` (or the next `put`) tries again. Raises ValueError for parts that contradict each other.

        `change`: what leads from the present parts to these, where the caller knows it better than a comparison finds it.
        """
        async with self._lock:
            before = {name: self.parts[name] for name in parts if name in self.parts}
            after = {name: part for name, part in parts.items() if part is not None}
            others = self._filled - filled_slots(before.values())
            change = change or difference(before.values(), after.values(), self._specs, others)
            self._keep(parts)
            if not self._is_open:
                return
            if not (self.is_intact and self._is_written and self.parts):  # with its last part the table goes
                if self.parts or self._is_written:
                    await self._replace()
            elif not change.is_empty:
                await self._carry_out(change)

    async def put_passing(self, elements: Mapping[str, Mapping[str, str]]) -> None:
        """Elements that the kernel forgets by itself (of sets with a timeout): they are in no part, and gone after a repair."""
        async with self._lock:
            if self._is_open and self._is_written:
                await self._carry_out(RuleChange(added=elements, specs=self._specs))

    async def check(self) -> str | None:
        """Who changed the table beside us ("" when unknown), None when all is as we wrote it. Does not repair."""
        async with self._lock:
            if not (self._is_open and self._is_written):
                return None
            by = await self.driver.disturbed()
            if by is None and self.is_intact and await self.driver.observe() is None:
                by = ""
            if by is not None:
                self.is_intact = False
            return by

    async def repair(self) -> None:
        """Write everything anew."""
        async with self._lock:
            if self._is_open:
                await self._replace()

    async def close(self) -> None:
        await self.driver.close()

    async def _carry_out(self, change: RuleChange) -> None:
        try:
            self.generation = (await self.driver.change(change)).generation
        except AgentError as error:
            if error.code == "program.missing":
                raise
            logger.warning("the table is not what it should be, it is written anew: %s", error)
            await self._replace()

    async def _replace(self) -> None:
        self.is_intact = False
        if self.parts:
            self.generation = (await self._apply(self.parts)).generation
        else:
            await self.driver.remove()
        self._is_written = bool(self.parts)
        self.is_intact = True

    async def _apply(self, parts: Mapping[str, RulePart]) -> RulesObserved:
        """Where a link of a flowtable has gone meanwhile, all without the flowtable."""
        try:
            return await self.driver.apply(RulePlan(parts=parts))
        except AgentError as error:
            plain = without_flowtables(parts)
            if error.code != "rules.refused" or plain == parts:
                raise
            logger.warning("no flow is offloaded: %s", error)
            return await self.driver.apply(RulePlan(parts=plain))

    def _keep(self, parts: Mapping[str, RulePart | None]) -> None:
        """In time for what is put, not for all that is there."""
        for name in parts:
            if (before := self.parts.pop(name, None)) is not None:
                self._filled -= filled_slots((before,))
                for set_name in before.sets:
                    self._specs.pop(set_name, None)
        for name, part in parts.items():
            if part is not None:
                self.parts[name] = part
                self._specs |= part.sets
                self._filled |= filled_slots((part,))
