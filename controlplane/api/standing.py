"""The right by which a stream was opened, looked at again while the stream is open.

The one rule: a stream outlives its right (a token revoked, a session ended, a role taken) by RECHECK_SECONDS at most, and a
database that cannot be asked by GRACE_SECONDS.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from sqlalchemy.exc import SQLAlchemyError
from starlette.requests import HTTPConnection

from controlplane.api.call import RequestContext, Services
from controlplane.api.session import authenticated
from controlplane.authz.service import Actor, Resource, authorise
from controlplane.core.errors import BedplateError, Forbidden, Unavailable

RECHECK_SECONDS = 12.0
GRACE_SECONDS = 60.0
_log = logging.getLogger(__name__)


class StreamCut(Exception):
    """Ends an answer that has begun without completing it: who reads it sees that it was cut, and asks anew."""


class RightsChanged(Forbidden):
    """What one may see has changed since the stream was opened: open it anew, behind what was read."""

    code = "stream.rights_changed"
    title = "Rights have changed"


@dataclass(slots=True, kw_only=True)
class Standing:
    """Who opened a stream, for which action where. `authorization` is what a WebSocket showed instead of the header."""

    services: Services
    connection: HTTPConnection
    actor: Actor
    action: str
    project_id: str | None = None
    authorization: str | None = None
    _seen_at: float = field(default_factory=time.monotonic)
    _looked_at: float = field(default_factory=time.monotonic)

    @property
    def due_seconds(self) -> float:
        """Until when one need not look again."""
        return max(0.0, self._looked_at + RECHECK_SECONDS - time.monotonic())

    async def lost(self) -> BedplateError:
        """Returns when the right is gone, with what a request would be answered now."""
        while True:
            await asyncio.sleep(self.due_seconds)
            if (refusal := await self.refusal()) is not None:
                return refusal

    async def holds(self) -> bool:
        """Whether the stream may go on; asks the database only when that is due."""
        return self.due_seconds > 0 or await self.refusal() is None

    async def refusal(self) -> BedplateError | None:
        """Why the stream may not go on; None when it may."""
        self._looked_at = now = time.monotonic()
        try:
            async with self.services.database.sessionmaker() as session:
                present = await authenticated(
                    self.services, session, self.connection, authorization=self.authorization, is_use=False
                )
        except BedplateError as refusal:
            return refusal
        except (SQLAlchemyError, OSError) as error:
            _log.warning("cannot look at the right of a stream: %s", error)
            return Unavailable("the right of this stream cannot be looked at") if now - self._seen_at > GRACE_SECONDS else None
        self._seen_at = now
        return self._refusal_of(present)

    def _refusal_of(self, present: Actor) -> BedplateError | None:
        """Of one project, what the action needs; of all that one sees, the same as before."""
        if self.project_id is None:
            return None if present == self.actor else RightsChanged()
        try:
            authorise(present, self.action, Resource(project_id=self.project_id, is_named=True))
        except BedplateError as refusal:
            return refusal
        return None


def standing_of(call: RequestContext) -> Standing:
    """Of the request that opens a stream."""
    project_id = call.project.id if call.project is not None else None
    return Standing(
        services=call.services, connection=call.request, actor=call.actor, action=call.action, project_id=project_id
    )


async def cut_when_lost(content: AsyncGenerator[bytes], standing: Standing) -> AsyncGenerator[bytes]:
    """`content` until its end; raises StreamCut when the right ends first. `content` may be left anywhere."""
    lost = asyncio.create_task(standing.lost())
    following: asyncio.Future[bytes] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(content))
            await asyncio.wait({following, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise StreamCut(lost.result().detail)
            try:
                chunk = following.result()
            except StopAsyncIteration:
                return
            yield chunk
    finally:
        for task in (lost, following):
            if task is not None:
                task.cancel()
        await asyncio.gather(lost, *([following] if following is not None else []), return_exceptions=True)
        await content.aclose()
