"""What a handler holds while it answers one request: the session, the actor, the project.

The one rule: everything a request changes goes through `call.session`, one transaction that the frame commits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Depends, Request
from sqlalchemy import ColumnElement, Select, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from starlette.responses import Response

from controlplane.api import idempotency
from controlplane.api.errors import ChangedMeanwhile
from controlplane.api.idempotency import Claim
from controlplane.api.pages import PageOf, PageQuery, page_of
from controlplane.audit.service import snapshot
from controlplane.authz.service import ANONYMOUS, Actor
from controlplane.core.clock import Clock
from controlplane.core.errors import NotFound, catalogue
from controlplane.core.ids import is_id
from controlplane.core.json import JsonObject
from controlplane.core.sealing import Sealer
from controlplane.events.feed import EventFeed
from controlplane.identity.oidc import Provider
from controlplane.models.base import Base
from controlplane.models.project import Project
from controlplane.settings import Settings

Row = TypeVar("Row", bound=Base)
Seen = Sequence[ColumnElement[bool]] | None


class Database(Protocol):
    """What the frame needs of the kernel's database handle."""

    @property
    def sessionmaker(self) -> async_sessionmaker[AsyncSession]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the process gives to every request."""

    settings: Settings
    database: Database
    sealer: Sealer
    clock: Clock
    events: EventFeed
    oidc: Provider | None = None


class AlreadyAnswered(Exception):
    """An earlier request with the same Idempotency-Key had this answer."""

    def __init__(self, answer: Response) -> None:
        super().__init__()
        self.answer = answer


class AbsentOnDelete(Exception):
    """A DELETE found nothing: answered 204, because deleting is idempotent."""


@dataclass(slots=True, kw_only=True)
class RequestContext:
    """One request. `subject` is the row it is about, `before` what that row was when it was loaded."""

    services: Services
    session: AsyncSession
    request: Request
    request_id: str
    actor: Actor
    action: str
    is_write: bool
    project: Project | None = None
    subject: Base | None = None
    before: JsonObject | None = field(default=None)
    claim: Claim | None = None

    @property
    def project_id(self) -> str:
        """The id of the project in the path; only for operations under one."""
        assert self.project is not None, "this operation is not under a project"
        return self.project.id

    @property
    def client_address(self) -> str:
        """Where the request comes from, as the listener knows it."""
        return self.request.client.host if self.request.client else ""

    async def load(self, model: type[Row], ref: str, *, seen: Seen = None) -> Row:
        """The row with this name or id that the actor may see; in a write it is locked and `If-Match` is checked.

        `seen` are the conditions of what may be seen where the project does not decide it. Raises NotFound (the noun's own
        type when it has one, AbsentOnDelete in a DELETE) and ChangedMeanwhile.
        """
        row = await self.find(model, ref, seen=seen)
        if row is None:
            if self.request.method == "DELETE" and self.subject is None:
                raise AbsentOnDelete
            raise not_found(model, ref)
        if self.subject is None:
            self.subject = row
            if self.is_write:
                self.before = snapshot(row)
                self._check_if_match(row)
        return row

    async def find(self, model: type[Row], ref: str, *, seen: Seen = None) -> Row | None:
        """Like `load`, but None when there is nothing, and without any check.

        What another resource keeps under its own name (`owner_id`) is found by id alone.
        """
        columns: Any = model
        if "\0" in ref:
            return None
        is_by_id = is_id(ref) or not hasattr(model, "name")
        matches = columns.id == ref if is_by_id else columns.name == ref
        query = select(model).where(matches, *(self.visible(model) if seen is None else seen))
        if not is_by_id and hasattr(model, "owner_id"):
            query = query.where(columns.owner_id.is_(None))
        return await self.session.scalar(query.with_for_update(key_share=True) if self.is_write else query)

    def visible(self, model: type[Base]) -> Sequence[ColumnElement[bool]]:
        """The conditions that limit `model` to the project in the path, else to what the actor may see."""
        columns: Any = model
        if self.project is not None and hasattr(model, "project_id"):
            return (columns.project_id == self.project.id,)
        if self.actor.is_operator:
            return ()
        if model is Project:
            return (columns.id.in_(self.actor.project_ids),)
        if hasattr(model, "project_id"):
            return (columns.project_id.in_(self.actor.project_ids),)
        return ()

    async def page(
        self,
        model: type[Row],
        page: PageQuery,
        *where: ColumnElement[bool],
        fields: Sequence[str] = (),
        seen: Seen = None,
    ) -> PageOf[Row]:
        """One page of the visible rows of `model`; `fields` may be sorted and filtered by, besides the usual ones."""
        query: Select[Row] = select(model).where(*(self.visible(model) if seen is None else seen), *where)
        return await page_of(self.session, model, query, page, fields=fields)

    async def take_key(self) -> None:
        """Hold the request's Idempotency-Key until the end of the transaction. Raises AlreadyAnswered."""
        key = self.request.headers.get("idempotency-key")
        if key is None or self.request.method != "POST" or self.actor is ANONYMOUS:
            return  # anonymous callers share no key: they are not one
        self.claim = await idempotency.claim(
            self.session,
            self.services.sealer,
            actor_id=self.actor.id,
            key=key,
            method=self.request.method,
            path=self.request.url.path,
            body=await self.request.body(),
        )
        if self.claim.answer is not None:
            raise AlreadyAnswered(self.claim.answer)

    @asynccontextmanager
    async def outside(self) -> AsyncIterator[None]:
        """No transaction meanwhile, for work that takes long and may be done by two at once.

        The Idempotency-Key is given back and taken anew: whoever ends first with it has answered for all.
        """
        if self.claim is not None:
            await self.claim.give_back()
        await self.release()
        yield
        await self.take_key()

    async def release(self) -> None:
        """End the transaction and give the connection back before a long wait; the next statement begins a new one."""
        await self.session.commit()

    def _check_if_match(self, row: Base) -> None:
        wanted = self.request.headers.get("if-match")
        generation = getattr(row, "generation", None)
        if wanted is None or generation is None or wanted.strip() == "*":
            return
        if str(generation) not in {part.strip().removeprefix("W/").strip('"') for part in wanted.split(",")}:
            raise ChangedMeanwhile(f"the present generation is {generation}, not {wanted}", generation=generation)


def not_found(model: type[Base], ref: str) -> NotFound:
    """The noun's `<noun>.not_found` error when it declares one."""
    noun = str(model.__tablename__)
    for kind in catalogue():
        if kind.code == f"{noun}.not_found" and issubclass(kind, NotFound):
            return kind(f"no {noun} {ref}")
    return NotFound(f"no {noun} {ref}")


def _current(request: Request) -> RequestContext:
    return request.state.call


Call = Annotated[RequestContext, Depends(_current)]
