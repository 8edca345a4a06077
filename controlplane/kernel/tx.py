"""The short transaction of a step: fenced by the lease first, the step's own words last.

The one rule: no call to a host inside `async with self.tx()`, no transaction left open across one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import asyncpg
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.json import Json
from controlplane.kernel.outcome import Done, Goto, Outcome, StepMethod, Wait, goto, wait
from controlplane.kernel.service import Connection


@dataclass(slots=True, kw_only=True)
class RawTx:
    """`conn` is in the transaction.

    A step may return `tx.goto(…)`, `tx.wait(…)` or `tx.done(…)` from inside the block: then the outcome is this
    transaction's last statement, and effect and successor commit together.
    """

    conn: Connection
    outcome: Outcome | None = field(default=None, init=False)

    def goto(self, step: StepMethod) -> Goto:
        self.outcome = outcome = goto(step)
        return outcome

    def wait(self, *, seconds: float | None = None) -> Wait:
        self.outcome = outcome = wait(seconds=seconds)
        return outcome

    def done(self, result: dict[str, Json] | None = None) -> Done:
        self.outcome = outcome = Done(result)
        return outcome


@dataclass(slots=True, kw_only=True)
class Tx(RawTx):
    """`session` and `conn` are in the same transaction; rows changed through `session` are flushed at the end."""

    session: AsyncSession


def driver_connection(raw: object) -> asyncpg.Connection:
    """The asyncpg connection under SQLAlchemy's adapter."""
    connection = getattr(raw, "driver_connection", None)
    assert isinstance(connection, asyncpg.Connection)
    return connection
