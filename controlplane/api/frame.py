"""The route frame: what every operation of the API goes through, so that a noun's routes hold only what is its own.

For each request: authenticate the token or session, find the project in the path, authorise the action, claim the
Idempotency-Key, run the handler, write operation, audit and event, set ETag and Location, commit. The kernel's session
nudges the workers after the commit.
The one rule: a handler returns a row (or a page of rows) and never commits. `docs/adding-a-resource.md` shows the use.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Path, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from sqlalchemy import select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.responses import Response

from controlplane.api.body import StrictRequest
from controlplane.api.call import AbsentOnDelete, AlreadyAnswered, Call, RequestContext, Services
from controlplane.api.errors import (
    BodyTooLarge,
    ChangedMeanwhile,
    IdempotencyInProgress,
    IdempotencyMismatch,
    MalformedJson,
    MediaTypeUnsupported,
)
from controlplane.api.pages import Page, PageOf
from controlplane.api.schemas import Listing
from controlplane.api.session import authenticated
from controlplane.audit import service as audit
from controlplane.authz.service import ANONYMOUS, Actor, Resource, authorise
from controlplane.core.errors import BedplateError, Forbidden, InvalidInput, NotFound, Unauthenticated, Unavailable
from controlplane.core.ids import is_id
from controlplane.core.paging import PageTokenInvalid
from controlplane.events.service import emit
from controlplane.identity.errors import CrossSite, SessionEnded, TokenMissing
from controlplane.models.base import Base
from controlplane.models.project import Project
from controlplane.resources.operation import service as operations

__all__ = ["Call", "Noun", "Page", "PageOf", "Ref", "RequestContext", "enter_project", "project_from_path"]

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])
Ref = Annotated[str, Path(description="Name or id.", examples=["web-1"], max_length=128)]

ACTION = "x-bedplate-action"
ACCEPTS = "x-bedplate-accepts"
PUBLIC = "x-bedplate-public"
"""Operations by which somebody signs in: they ask for no token."""
_ALWAYS: tuple[type[BedplateError], ...] = (
    TokenMissing,
    Unauthenticated,
    SessionEnded,
    InvalidInput,
    Unavailable,
    BedplateError,
)
_ON_BODY: tuple[type[BedplateError], ...] = (MalformedJson, BodyTooLarge, MediaTypeUnsupported)


def project_from_path(project: Annotated[str, Path(description="Name or id of the project.", examples=["default"])]) -> None:
    """Declares the path parameter; the frame itself resolves it."""
    del project


@dataclass(frozen=True, slots=True)
class Operation:
    """What the frame knows of a route."""

    action: str
    accepts: str
    _: KW_ONLY
    is_named: bool
    is_public: bool


class FramedRoute(APIRoute):
    """One operation. Its action stands in the OpenAPI document as `x-bedplate-action`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        inner = super().get_route_handler()
        action = str((self.openapi_extra or {})[ACTION])
        accepts = str((self.openapi_extra or {}).get(ACCEPTS, "application/json"))
        is_public = bool((self.openapi_extra or {}).get(PUBLIC))
        is_named = "{" in self.path_format.removeprefix("/v1/projects/{project}/")

        async def handle(request: Request) -> Response:
            strict = StrictRequest(request.scope, request.receive)
            return await _answer(strict, inner, Operation(action, accepts, is_named=is_named, is_public=is_public))

        return handle


async def _answer(request: Request, inner: Callable[[Request], Awaitable[Response]], operation: Operation) -> Response:
    services: Services = request.app.state.services
    async with services.database.sessionmaker() as session:
        call = RequestContext(
            services=services,
            session=session,
            request=request,
            request_id=request.scope.get("bedplate.request_id", ""),
            actor=ANONYMOUS if operation.is_public else await _authenticated(services, session, request),
            action=operation.action,
            is_write=request.method not in {"GET", "HEAD"},
        )
        request.state.call = call
        if not operation.is_public:
            await enter_project(call, is_named=operation.is_named)
        _check_media_type(request, operation.accepts)
        try:
            await call.take_key()
            response = await inner(request)
        except AlreadyAnswered as earlier:
            return earlier.answer
        except AbsentOnDelete:
            return Response(status_code=204)
        if not call.is_write:
            await session.commit()
            return _read(call, response)
        await _conclude(call, response)
        if call.claim is not None:
            await call.claim.store(response)
        await session.commit()
        services.events.poke()
        return response


async def _authenticated(services: Services, session: AsyncSession, request: Request) -> Actor:
    """The actor; once more on a fresh connection when the pooled one was dead, for nothing was done yet."""
    try:
        return await authenticated(services, session, request)
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise
        await session.rollback()
        return await authenticated(services, session, request)


async def enter_project(call: RequestContext, *, is_named: bool) -> None:
    """Resolve `{project}` and authorise; a project the actor may not see answers like one that does not exist."""
    ref = call.request.path_params.get("project")
    if ref is None:
        authorise(call.actor, call.action, Resource(is_named=is_named))
        return
    column = Project.id if is_id(ref) else Project.name
    found = None if "\0" in ref else await call.session.scalar(select(Project).where(column == ref))
    if found is None and call.action.startswith("project.") and call.actor.is_operator:
        return  # the project itself is the subject: its handler answers
    if found is None:
        raise _project_not_found(ref)
    try:
        authorise(call.actor, call.action, Resource(project_id=found.id, is_named=is_named))
    except NotFound as error:
        raise _project_not_found(ref) from error
    if not call.action.startswith("project."):
        call.project = found


def _project_not_found(ref: str) -> NotFound:
    from controlplane.resources.project.errors import ProjectNotFound

    return ProjectNotFound(f"no project {ref}")


def _check_media_type(request: Request, accepts: str) -> None:
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if has_body and request.method != "GET" and given != accepts:
        raise MediaTypeUnsupported(f"the body must be {accepts}, not {given or 'without a Content-Type'}")


async def _conclude(call: RequestContext, response: Response) -> None:
    """Audit, event and headers of a change."""
    row: Any = call.subject
    if row is None:
        return
    is_gone = response.status_code == 204
    project_id = row.id if isinstance(row, Project) else getattr(row, "project_id", None)
    kind, name = str(row.__tablename__), getattr(row, "name", "")
    await audit.record(
        call.session,
        call.actor,
        call.action,
        subject_kind=kind,
        subject_id=row.id,
        project_id=project_id,
        request_id=call.request_id,
        before=call.before,
        after=None if is_gone else audit.snapshot(row),
    )
    body = {"name": name, "actor": call.actor.id, "request_id": call.request_id}
    await emit(call.session, call.action, kind, row.id, project_id=project_id, body=body)
    _set_etag(response, row)
    _set_location(call, response, row.id)
    operation_id = operations.recorded(call.session, row.id)
    if operation_id is not None:
        response.headers["x-operation-id"] = operation_id


def _set_location(call: RequestContext, response: Response, row_id: str) -> None:
    if response.status_code == 201:
        response.headers["location"] = f"{call.request.url.path.rstrip('/')}/{row_id}"


def _set_etag(response: Response, row: Base | None) -> None:
    generation = getattr(row, "generation", None)
    if generation is not None and response.status_code != 204:
        response.headers["etag"] = f'"{generation}"'


def _read(call: RequestContext, response: Response) -> Response:
    """The answer of a read: ETag, and 304 when the caller has this generation already."""
    _set_etag(response, call.subject)
    etag = response.headers.get("etag")
    if etag is not None and call.request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers={"etag": etag})
    return response


class Noun:
    """The operations of one noun: each method declares one route, its action, its operation id and its errors.

    `plural` is the path part (`vms`), also the first half of operation ids. With `in_project` the paths stand under
    `/v1/projects/{project}`. With `has_operations` each change also records an operation, named in `x-operation-id`.
    """

    def __init__(
        self, kind: str, plural: str, *, in_project: bool = True, has_operations: bool = True, param: str = ""
    ) -> None:
        self.kind = kind
        self.plural = plural
        self.has_operations = has_operations
        base = f"/v1/projects/{{project}}/{plural}" if in_project else f"/v1/{plural}"
        self._item = f"/{{{param or kind}}}"
        self._title = kind.replace("_", " ")
        scope = [Depends(project_from_path)] if in_project else []
        self.router = APIRouter(prefix=base, tags=[plural], dependencies=scope, route_class=FramedRoute)

    def create(self, view: type[BaseModel], *, errors: Sequence[type[BedplateError]] = ()) -> Callable[[Handler], Handler]:
        """`POST /plural`: the handler returns the new row (or sets `call.subject`); 201 with Location."""
        return self.route("POST", "", "create", view, status=201, errors=errors)

    def list(self, view: type[BaseModel], *, errors: Sequence[type[BedplateError]] = ()) -> Callable[[Handler], Handler]:
        """`GET /plural`: the handler returns `await call.page(Model, page)`."""
        return self.route("GET", "", "list", Listing[view], errors=(PageTokenInvalid, *errors))

    def show(self, view: type[BaseModel], *, errors: Sequence[type[BedplateError]] = ()) -> Callable[[Handler], Handler]:
        """`GET /plural/{noun}`: the handler returns the row of `call.load`."""
        return self.route("GET", self._item, "show", view, errors=errors)

    def update(self, view: type[BaseModel], *, errors: Sequence[type[BedplateError]] = ()) -> Callable[[Handler], Handler]:
        """`PATCH /plural/{noun}`: the handler changes the row of `call.load` and returns it; the generation is raised."""
        return self.route("PATCH", self._item, "update", view, errors=(ChangedMeanwhile, *errors))

    def delete(self, view: type[BaseModel], *, errors: Sequence[type[BedplateError]] = ()) -> Callable[[Handler], Handler]:
        """`DELETE /plural/{noun}`: the handler returns the row (202, going) or None (204, gone)."""
        return self.route("DELETE", self._item, "delete", view, status=202, errors=(ChangedMeanwhile, *errors))

    def action(
        self, verb: str, view: type[BaseModel], *, status: int = 200, errors: Sequence[type[BedplateError]] = ()
    ) -> Callable[[Handler], Handler]:
        """`POST /plural/{noun}/{verb}`: like `update`."""
        return self.route("POST", f"{self._item}/{verb}", verb, view, status=status, errors=(ChangedMeanwhile, *errors))

    def route(
        self,
        method: str,
        path: str,
        verb: str,
        view: Any,
        *,
        status: int = 200,
        errors: Sequence[type[BedplateError]] = (),
        answers: dict[int | str, dict[str, Any]] | None = None,
        accepts: str = "",
        is_public: bool = False,
        **options: Any,
    ) -> Callable[[Handler], Handler]:
        """Any other operation: `path` is what follows the plural; `answers` are declared besides; `options` go to FastAPI.

        `accepts` is the content type of bodies when it is not JSON; a public operation asks for no token.
        Many parameters, because they are what FastAPI and the OpenAPI document are told; usual operations have a shorter way.
        """

        def declare(handler: Handler) -> Handler:
            self.router.add_api_route(
                path,
                _settled(handler, self, verb, method),
                methods=[method],
                status_code=status,
                response_model=view,
                operation_id=f"{self.plural}_{verb}".replace("-", "_"),
                summary=f"{verb.replace('-', ' ').capitalize()} {self.plural if verb == 'list' else self._title}",
                description=(handler.__doc__ or "").strip() or None,
                responses=_declared(method, errors) | (answers or {}),
                openapi_extra=_extra(f"{self.kind}.{verb}", accepts, is_public=is_public),
                **options,
            )
            return handler

        return declare


def _extra(action: str, accepts: str, *, is_public: bool) -> dict[str, Any]:
    """What the OpenAPI document says besides, and the frame reads back."""
    extra: dict[str, Any] = {ACTION: action, ACCEPTS: accepts} if accepts else {ACTION: action}
    return extra | ({PUBLIC: True, "security": []} if is_public else {})


def _declared(method: str, errors: Sequence[type[BedplateError]]) -> dict[int | str, dict[str, Any]]:
    """The answers besides the usual one."""
    gone: dict[int | str, dict[str, Any]] = {204: {"description": "It is gone."}} if method == "DELETE" else {}
    return gone | declared_problems(method, errors)


def declared_problems(method: str, errors: Sequence[type[BedplateError]]) -> dict[int | str, dict[str, Any]]:
    """The error answers of an operation for the OpenAPI document, by status, naming their codes."""
    general: list[type[BedplateError]] = [*_ALWAYS, NotFound, Forbidden]
    if method != "GET":
        general.append(CrossSite)
    if method in {"POST", "PATCH", "PUT"}:
        general += _ON_BODY
    if method == "POST":
        general += (IdempotencyMismatch, IdempotencyInProgress)
    by_status: dict[int, list[type[BedplateError]]] = {}
    for kind in (*errors, *general):
        by_status.setdefault(kind.status, []).append(kind)
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {
        status: {
            "description": ". ".join(f"`{kind.code}`: {kind.title}" for kind in dict.fromkeys(kinds)),
            "content": content,
        }
        for status, kinds in sorted(by_status.items())
    }


def _settled(handler: Callable[..., Awaitable[Any]], noun: Noun, verb: str, method: str) -> Callable[..., Awaitable[Any]]:
    """`handler`, followed by what each change needs: a raised generation, the values the database makes, an operation."""

    @functools.wraps(handler)
    async def settled(*args: Any, **kwargs: Any) -> Any:
        result = await handler(*args, **kwargs)
        call = next((value for value in kwargs.values() if isinstance(value, RequestContext)), None)
        if call is None or not call.is_write:
            return result
        if verb == "create" and isinstance(result, Base):
            call.subject = result
        row: Any = call.subject
        if row is not None and result is not None:
            if verb != "create" and row in call.session.dirty and call.session.is_modified(row) and hasattr(row, "generation"):
                row.generation += 1
            await call.session.flush()
        if row is not None and noun.has_operations:
            await operations.record_once(call.session, row, f"{noun.kind}.{verb}", call.actor)
        return Response(status_code=204) if result is None and method == "DELETE" else result

    return settled
