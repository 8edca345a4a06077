"""Budgets of keys, in tokens and money: taken from the database in chunks, spent here, settled by metering.

The one rule: what is in hand here is counted as held in the database, so all gateways together never spend more than the
budget. With the database away the chunk in hand is all there is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import asyncpg

from controlplane.gateway import problem, queries
from controlplane.gateway.directory import Budget, KeyEntry, Price
from controlplane.metering.record import Closing

log = logging.getLogger(__name__)

_SECONDS = 2
_TOUCH_SECONDS = 600.0
_ALL = 1 << 62
_AWAY = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def period_of(period: str, now: datetime) -> tuple[datetime, float]:
    """When the period began, and its end in seconds since the epoch. `total` has neither."""
    day = now.replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "day":
        return day, (day + timedelta(days=1)).timestamp()
    if period == "month":
        first = day.replace(day=1)
        return first, (first + timedelta(days=32)).replace(day=1).timestamp()
    return _EPOCH, float("inf")


class Purse:
    """What of one key's budget is in hand here, for one period."""

    def __init__(self, key: KeyEntry) -> None:
        assert key.budget is not None
        self.budget = key.budget
        self.start, self.end = period_of(key.budget.period, datetime.now(UTC))
        self.tokens = 0 if key.budget.tokens is not None else _ALL
        self.micros = 0 if key.budget.money_micros is not None else _ALL
        self.pending_tokens = self.pending_micros = 0
        self.is_soft = False
        self.lock = asyncio.Lock()

    def change(self, budget: Budget) -> None:
        """The budget was changed while something of it was in hand."""
        old, self.budget = self.budget, budget
        if (old.tokens is None) != (budget.tokens is None):
            self.tokens = 0 if budget.tokens is not None else _ALL
        if (old.money_micros is None) != (budget.money_micros is None):
            self.micros = 0 if budget.money_micros is not None else _ALL

    def covers(self, tokens: int, micros: int) -> bool:
        return self.tokens >= tokens and self.micros >= micros


@dataclass(slots=True)
class Held:
    """What one request took; `settle` puts back what it did not use."""

    purse: Purse
    tokens: int
    micros: int

    @property
    def is_soft(self) -> bool:
        return self.purse.is_soft

    def settle(self, closing: Closing | None, price: Price | None) -> None:
        """Once; None = nothing is billed."""
        tokens, micros = self.tokens, self.micros
        self.tokens = self.micros = 0
        if closing is not None:
            tokens -= closing.prompt_tokens + closing.completion_tokens
            if price is not None:
                micros -= price.of(closing.prompt_tokens, closing.cached_tokens, closing.completion_tokens)
        self.purse.tokens += tokens
        self.purse.micros += micros


class Budgets:
    """`since_segment` tells this process's holds from those of one before it."""

    def __init__(self, database_url: str, instance: str, since_segment: int) -> None:
        self._url = database_url
        self._who = (instance, since_segment)
        self._purses: dict[str, Purse] = {}
        self._connection: asyncpg.Connection | None = None
        self._lock = asyncio.Lock()

    async def hold(self, key: KeyEntry, tokens: int, micros: int) -> Held:
        """Raises Problem 429 when the budget does not cover it; takes nothing then."""
        purse = self._purses.get(key.id)
        if purse is None or time.time() >= purse.end or (key.budget and purse.budget.period != key.budget.period):
            purse = self._purses[key.id] = Purse(key)
        elif key.budget is not None and purse.budget != key.budget:
            purse.change(key.budget)
        if not purse.covers(tokens, micros):
            await self._fill(key.id, purse, tokens, micros)
        purse.tokens -= tokens
        purse.micros -= micros
        return Held(purse, tokens, micros)

    async def _fill(self, key_id: str, purse: Purse, tokens: int, micros: int) -> None:
        """Take a chunk from the database; those who come meanwhile wait for it and are counted in."""
        purse.pending_tokens += tokens
        purse.pending_micros += micros
        try:
            async with purse.lock:
                if purse.covers(tokens, micros):
                    return
                try:
                    async with asyncio.timeout(_SECONDS):
                        chunk = await self._take(key_id, purse)
                except _AWAY as error:
                    log.warning("no more of the budget of %s can be had: %s", key_id, error)
                    raise problem.out_of_budget("what can be reached now") from error
                purse.is_soft = chunk.is_soft
                purse.tokens += chunk.tokens
                purse.micros += chunk.money_micros
                if purse.tokens < tokens:
                    raise problem.out_of_budget("tokens")
                if purse.micros < micros:
                    raise problem.out_of_budget("money")
        finally:
            purse.pending_tokens -= tokens
            purse.pending_micros -= micros

    async def _take(self, key_id: str, purse: Purse) -> queries.Chunk:
        need = (max(0, purse.pending_tokens - purse.tokens), max(0, purse.pending_micros - purse.micros))
        async with self._lock:
            connection = self._connection
            if connection is None or connection.is_closed():
                connection = self._connection = await asyncpg.connect(self._url, timeout=_SECONDS, command_timeout=_SECONDS)
            try:
                return await queries.take_budget(connection, self._who, key_id, (purse.budget, purse.start), need)
            except BaseException:
                connection.terminate()
                self._connection = None
                raise

    async def run(self) -> None:
        """Until cancelled: say that what is in hand here is still in somebody's hand."""
        while True:
            await asyncio.sleep(_TOUCH_SECONDS)
            with suppress(*_AWAY):
                connection = await asyncpg.connect(self._url, timeout=_SECONDS, command_timeout=_SECONDS)
                try:
                    await queries.touch_budgets(connection, self._who)
                finally:
                    connection.terminate()

    async def close(self) -> None:
        """Let go of what is in hand; to be called when all has landed."""
        if self._connection is not None:
            self._connection.terminate()
        with suppress(*_AWAY):
            connection = await asyncpg.connect(self._url, timeout=_SECONDS, command_timeout=_SECONDS)
            try:
                await queries.drop_budgets(connection, self._who)
            finally:
                connection.terminate()
