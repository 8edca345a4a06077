"""Idempotency-Key on every POST: the first request's answer is stored, sealed, in the first request's own transaction.

The one rule: the INSERT of the key is the lock. A second request with the same key waits for the first transaction's end,
then either replays its answer or, when it was rolled back, does the work itself.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import delete, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from controlplane.api.errors import IdempotencyInProgress, IdempotencyMismatch
from controlplane.core import json
from controlplane.core.errors import FieldError, InvalidInput
from controlplane.core.sealing import Sealer
from controlplane.models.idempotency import IdempotencyKey

RETENTION = timedelta(hours=24)
_MAX_KEY_CHARACTERS = 255
_WAIT_SECONDS = 10
_STORED_HEADERS = ("location", "etag", "content-type", "x-operation-id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A key held by this request; `answer` is what an earlier one stored."""

    session: AsyncSession
    sealer: Sealer
    actor_id: str
    key: str
    answer: Response | None = None

    @property
    def _context(self) -> str:
        return f"idempotency:{self.actor_id}:{self.key}"

    async def store(self, response: Response) -> None:
        """Keep `response` for later requests with this key; lives or dies with the transaction."""
        kept = {name: response.headers[name] for name in _STORED_HEADERS if name in response.headers}
        body = base64.b64encode(bytes(response.body)).decode()
        sealed = self.sealer.seal(json.dumps({"headers": kept, "body": body}), context=self._context)
        await self.session.execute(
            update(IdempotencyKey)
            .where(IdempotencyKey.actor == self.actor_id, IdempotencyKey.key == self.key)
            .values(status=response.status_code, answer=sealed)
        )

    async def give_back(self) -> None:
        """As if it had never been taken."""
        ours = (IdempotencyKey.actor == self.actor_id) & (IdempotencyKey.key == self.key)
        await self.session.execute(delete(IdempotencyKey).where(ours))

    def reopened(self, row: IdempotencyKey) -> Response:
        if row.answer is None or row.status is None:
            raise IdempotencyInProgress
        stored = json.loads(self.sealer.open(row.answer, context=self._context))
        assert isinstance(stored, dict)
        headers, body = stored["headers"], stored["body"]
        assert isinstance(headers, dict)
        assert isinstance(body, str)
        answer = Response(base64.b64decode(body), row.status, {name: str(value) for name, value in headers.items()})
        answer.headers["idempotency-replayed"] = "true"
        return answer


async def claim(
    session: AsyncSession, sealer: Sealer, *, actor_id: str, key: str, method: str, path: str, body: bytes
) -> Claim:
    """Take `key` for this request. Raises IdempotencyMismatch, IdempotencyInProgress, InvalidInput.

    Many parameters, because a request is the same only when all of these are.
    """
    if not 1 <= len(key) <= _MAX_KEY_CHARACTERS or not key.isascii() or not key.isprintable():
        wrong = FieldError(pointer="/idempotency-key", detail="1 to 255 printable ASCII characters", source="header")
        raise InvalidInput("the Idempotency-Key is not valid", errors=(wrong,))
    request = hashlib.sha256(b"\0".join((method.encode(), path.encode(), body))).digest()
    expired = IdempotencyKey.created_at < func.now() - RETENTION
    ours = (IdempotencyKey.actor == actor_id) & (IdempotencyKey.key == key)
    await session.execute(text(f"SET LOCAL lock_timeout = '{_WAIT_SECONDS}s'"))
    try:
        await session.execute(delete(IdempotencyKey).where(ours, expired))
        statement = insert(IdempotencyKey).values(actor=actor_id, key=key, request_sha256=request).on_conflict_do_nothing()
        taken = await session.scalar(statement.returning(IdempotencyKey.key))
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", "") == "55P03":
            raise IdempotencyInProgress from error
        raise
    await session.execute(text("SET LOCAL lock_timeout = DEFAULT"))
    held = Claim(session=session, sealer=sealer, actor_id=actor_id, key=key)
    if taken is not None:
        return held
    row = await session.scalar(select(IdempotencyKey).where(ours))
    if row is None:
        raise IdempotencyInProgress
    if row.request_sha256 != request:
        raise IdempotencyMismatch
    return Claim(session=session, sealer=sealer, actor_id=actor_id, key=key, answer=held.reopened(row))
