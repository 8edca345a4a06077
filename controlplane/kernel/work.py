"""One claimed run in this process: its row as claimed, what its step wants to send, and how outcomes are written.

The one rule: everything written here is fenced by the claim's lease; LeaseLost means another worker goes on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self, cast

import asyncpg
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core import json
from controlplane.core.ids import Kind, is_id
from controlplane.core.json import Json
from controlplane.kernel import operation, service, sql
from controlplane.kernel.database import DUE, Database, KernelSession
from controlplane.kernel.outcome import Done, Goto, LeaseLost, Outcome, Wait
from controlplane.kernel.service import Connection
from controlplane.kernel.tx import RawTx, Tx, driver_connection


@dataclass(frozen=True, slots=True)
class Told:
    """A signal as a step sees it."""

    kind: str
    body: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Start:
    program: str
    subject: str
    host_id: str | None


@dataclass(frozen=True, slots=True)
class Send:
    program: str
    subject: str
    kind: str
    body: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class SendParents:
    kind: str
    body: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Move:
    host_id: str


Word = Start | Send | SendParents | Move


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """An outcome that is committed. `is_urgent`: look again at once; for a hop: an end was asked for."""

    outcome: Outcome
    is_refused: bool = False
    is_urgent: bool = False


class _Refused(Exception):
    """A run may not end now: a signal it has not seen is there, or is being sent."""

    def __init__(self, outcome: Done) -> None:
        self.outcome = outcome
        super().__init__()


@dataclass(slots=True, kw_only=True)
class Work:
    """Its methods raise LeaseLost when another worker holds the run."""

    database: Database
    run_id: str
    program: str
    subject: str
    shard: int
    step: str
    stored_memo: str
    lease: int
    attempt: int
    last_error: str | None
    destroy_at: datetime | None
    deadline_at: datetime | None
    overdue_at: datetime | None
    is_ready: bool
    traceparent: str | None
    signals: Sequence[Told]
    seconds_of: Mapping[str, float | None]  # of each step, until its deadline; None is a rest step
    subject_name: str = ""  # for people
    dump_memo: Callable[[], str] | None = None
    memo_to_store: str | None = None  # what the open transaction stores, when it changed
    words: list[Word] = field(default_factory=list)
    written: Written | None = None
    due: dict[tuple[str, int], None] = field(default_factory=dict)

    @classmethod
    def of(cls, row: asyncpg.Record, database: Database, seconds_of: Mapping[str, float | None]) -> Self:
        signals = cast("list[dict[str, Any]]", json.loads(row["signals"]) if row["signals"] else [])
        return cls(
            database=database,
            run_id=row["id"],
            program=row["program"],
            subject=row["subject"],
            shard=row["shard"],
            step=row["step"],
            stored_memo=row["memo"],
            lease=row["lease"],
            attempt=row["attempt"],
            last_error=row["last_error"],
            destroy_at=row["destroy_at"],
            deadline_at=row["deadline_at"],
            overdue_at=row["overdue_at"],
            is_ready=row["ready_at"] is not None,
            traceparent=row["traceparent"],
            signals=[Told(told["kind"], told["body"]) for told in signals],
            seconds_of=seconds_of,
        )

    # -- transactions -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def raw_tx(self) -> AsyncIterator[RawTx]:
        async with self.database.pool.acquire() as connection:
            assert is_id(self.run_id, Kind.RUN)
            tag = await connection.execute(sql.BEGIN_FENCED.format(run_id=self.run_id, lease=self.lease))
            try:
                self._require_lease(tag == "SELECT 1")
                tx = RawTx(conn=connection)
                yield tx
                written = await self.end(connection, tx.outcome)
                await connection.execute("COMMIT")
            except _Refused as refused:
                await connection.execute("ROLLBACK")
                written = await self._put_back(connection, refused)
            except BaseException:
                if connection.is_in_transaction():
                    await connection.execute("ROLLBACK")
                raise
        self._committed(written)

    @asynccontextmanager
    async def tx(self) -> AsyncIterator[Tx]:
        async with self.database.engine.connect() as connection:
            fenced = (await connection.exec_driver_sql(sql.FENCE_AND_LOOK, (self.run_id, self.lease))).first()
            if fenced is None:
                raise LeaseLost(self.run_id)
            raw = driver_connection(await connection.get_raw_connection())
            async with AsyncSession(connection, expire_on_commit=False, sync_session_class=KernelSession) as session:
                tx = Tx(conn=raw, session=session)
                yield tx
                await session.flush()
                nudged: dict[tuple[str, int], None] = session.info.pop(DUE, {})
                try:
                    written = await self.end(raw, tx.outcome)
                    if fenced[0]:
                        is_in_step = not isinstance(tx.outcome, Goto | Done)
                        await operation.settle_subject(session, self.subject, self.run_id, is_in_step=is_in_step)
                    await connection.commit()
                    self.due |= nudged
                except _Refused as refused:
                    await connection.rollback()
                    written = await self._put_back(raw, refused)
        self._committed(written)

    def _committed(self, written: Written | None) -> None:
        if self.memo_to_store is not None:
            self.stored_memo, self.memo_to_store = self.memo_to_store, None
        self.words.clear()
        if written is not None:
            self.written = written
            if isinstance(written.outcome, Goto):
                self.step, self.attempt, self.signals, self.overdue_at, self.last_error = (
                    written.outcome.step,
                    1,
                    (),
                    None,
                    None,
                )
        for run_id, shard in self.due:
            self.database.publisher.due(run_id, shard)
        self.due.clear()

    # -- the last statements ------------------------------------------------------------------------------------------

    async def write(self, outcome: Outcome) -> None:
        """Write an outcome by itself: one statement where one is enough, else one transaction."""
        self._note_memo()
        async with self.database.pool.acquire() as connection:
            if isinstance(outcome, Goto) and not self.words and not self.signals and not self._rests(outcome.step):
                written = await self._hop(connection, outcome)
            elif isinstance(outcome, Wait) and not self.words and not self.signals and not self._rests(self.step):
                written = await self._settle(connection, outcome)
            else:
                try:
                    async with connection.transaction():
                        self._require_lease(await connection.fetchval(sql.FENCE, self.run_id, self.lease) is not None)
                        written = await self.end(connection, outcome)
                except _Refused as refused:
                    written = await self._put_back(connection, refused)
        self._committed(written)

    async def end(self, connection: Connection, outcome: Outcome | None) -> Written | None:
        """What stands at the end of every transaction of a step: its words, its memo, and the outcome if it is known."""
        self._note_memo()
        for word in sorted(self.words, key=repr):  # one order for all, so that two inserts of the same run wait, not deadlock
            await self._say(connection, word)
        match outcome:
            case None:
                if self.memo_to_store is not None:
                    await connection.execute(sql.REMEMBER, self.run_id, self.lease, self.memo_to_store)
                return None
            case Goto():
                await self._consume(connection)
                await self._become_ready(connection, outcome.step)
                return await self._hop(connection, outcome)
            case Wait():
                await self._consume(connection)
                await self._become_ready(connection, self.step)
                return await self._settle(connection, outcome)
            case Done():
                await self._consume(connection)
                return await self._finish(connection, outcome)

    def _require_lease(self, is_held: bool) -> None:
        if not is_held:
            raise LeaseLost(self.run_id)

    def _note_memo(self) -> None:
        if self.dump_memo is not None:
            memo = self.dump_memo()
            self.memo_to_store = None if memo == self.stored_memo else memo

    def _rests(self, step: str) -> bool:
        """Whether being in `step` makes the run ready for the first time."""
        return not self.is_ready and step in self.seconds_of and self.seconds_of[step] is None

    async def _become_ready(self, connection: Connection, step: str) -> None:
        if self._rests(step):
            self.is_ready = True
            await self._tell(await connection.fetch(sql.READY, self.run_id, self.lease), connection)

    async def _consume(self, connection: Connection) -> None:
        if self.signals:
            await connection.execute(sql.CONSUME, self.run_id)

    async def _hop(self, connection: Connection, outcome: Goto) -> Written:
        row = await connection.fetchrow(
            sql.HOP,
            self.run_id,
            self.lease,
            outcome.step,
            self.memo_to_store,
            self.seconds_of.get(outcome.step),
            self.step,
        )
        if row is None:
            raise LeaseLost(self.run_id)
        return Written(outcome=outcome, is_urgent=row[0])

    async def _settle(self, connection: Connection, outcome: Wait) -> Written:
        row = await connection.fetchrow(sql.SETTLE, self.run_id, self.lease, self.step, self.memo_to_store, outcome.seconds)
        if row is None:
            raise LeaseLost(self.run_id)
        return Written(outcome=outcome, is_urgent=row[0])

    async def _finish(self, connection: Connection, outcome: Done) -> Written:
        result = None if outcome.result is None else json.dumps(dict(outcome.result)).decode()
        row = None
        if await connection.fetchval(sql.LOCK_TO_FINISH, self.program, self.subject):
            row = await connection.fetchrow(sql.FINISH, self.run_id, self.lease, result, self.step)
        if row is None:
            raise _Refused(outcome)
        await self._tell([(run_id,) for run_id in row["told"] or ()], connection)
        return Written(outcome=outcome)

    async def _put_back(self, connection: Connection, refused: _Refused) -> Written:
        """The end was refused, and all that was said or done with it was rolled back: the step is run again."""
        self.memo_to_store = None
        self.due.clear()
        await connection.execute(sql.PUT_BACK, self.run_id, self.lease, self.step)
        return Written(outcome=refused.outcome, is_refused=True, is_urgent=True)

    async def park(self, code: str, detail: str) -> Written:
        async with self.database.pool.acquire() as connection:
            row = await connection.fetchrow(sql.PARK, self.run_id, self.lease, code, detail, self.step)
            if row is None:
                raise LeaseLost(self.run_id)
            await self._tell([(run_id,) for run_id in row["told"] or ()], connection)
        self._committed(None)
        async with self.database.session() as session:
            await operation.settle_subject(session, self.subject, self.run_id)
        return Written(outcome=Wait(None), is_urgent=row["is_signalled"])

    # -- words to other runs ------------------------------------------------------------------------------------------

    async def _say(self, connection: Connection, word: Word) -> None:
        match word:
            case Start():
                if await connection.fetchval(sql.HAS_SPAWNED, self.run_id, word.program, word.subject):
                    return
                run_id = await service.start(connection, word.program, word.subject, host_id=word.host_id)
                await connection.execute(sql.LINK, self.run_id, run_id)
                await self._tell([(run_id,)], connection)
            case Send():
                run_id = await service.signal(connection, word.program, word.subject, word.kind, word.body)
                await self._tell([(run_id,)] if run_id else [], connection)
            case SendParents():
                body = json.dumps(dict(word.body)).decode()
                await self._tell(await connection.fetch(sql.SIGNAL_PARENTS, self.run_id, word.kind, body), connection)
            case Move():
                self.shard = service.shard_of(word.host_id)
                await connection.execute(sql.MOVE, self.run_id, self.lease, self.shard)

    async def _tell(self, rows: Sequence[Sequence[str]], connection: Connection) -> None:
        """Remember the nudged runs, to be published after the commit."""
        if rows:
            for run_id, shard in await connection.fetch(sql.SHARDS_OF, [row[0] for row in rows]):
                self.due[run_id, shard] = None
