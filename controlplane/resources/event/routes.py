"""`/v1/events`: what happens, as it happens."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query
from starlette.responses import StreamingResponse

from controlplane.api.call import not_found
from controlplane.api.frame import Call, Noun
from controlplane.api.standing import standing_of
from controlplane.authz.service import Resource, authorise
from controlplane.core.errors import FieldError, NotFound
from controlplane.models.project import Project
from controlplane.resources.event import service
from controlplane.resources.event.errors import EventPositionInvalid
from controlplane.resources.event.queries import Wanted
from controlplane.resources.project.errors import ProjectNotFound

noun = Noun("event", "events", in_project=False, has_operations=False)
router = noun.router

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Server-sent events: `id` is the position, `event` the kind, `data` an event as JSON.",
        "content": {
            "text/event-stream": {"schema": {"type": "string"}, "example": 'id: 7\nevent: vm.create\ndata: {"id":"evt_…"}\n\n'}
        },
    }
}
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}

After = Annotated[
    str | None, Query(description="A position: begin behind it. 0: with the oldest. Without: from now on.", examples=["4711"])
]
OfProject = Annotated[str | None, Query(description="Only events of this project (name or id).", examples=["default"])]
OfKind = Annotated[
    list[str] | None, Query(description="Only kinds that begin so; may be repeated.", examples=[["vm."]], max_length=16)
]
OfSubject = Annotated[
    str | None, Query(description="Only events of the thing with this id.", examples=["vm_01jd2x4k3fe8v9m2q7t5w0y6za"])
]


@noun.route(
    "GET", "", "list", None, errors=[EventPositionInvalid, ProjectNotFound], answers=_STREAM, response_class=StreamingResponse
)
async def list_(
    call: Call, after: After = None, project: OfProject = None, kind: OfKind = None, subject: OfSubject = None
) -> StreamingResponse:
    """Follow events as server-sent events; a browser's `Last-Event-ID` goes on where it was cut.

    The stream ends when the token or session does, or when what one may see changes; opening it anew loses nothing.
    """
    begin = _position(call.request.headers.get("last-event-id") or after)
    wanted = Wanted(project_ids=await _project_ids(call, project), kinds=tuple(kind or ()), subject_id=subject)
    content = service.stream(call.services.database, call.services.events, begin, wanted, standing_of(call))
    return StreamingResponse(content, media_type="text/event-stream", headers=_HEADERS)


async def _project_ids(call: Call, ref: str | None) -> tuple[str, ...] | None:
    """The projects to look at; members see theirs only, and an operator all (None) when none is named."""
    if ref is None:
        return None if call.actor.is_operator else call.actor.project_ids
    row = await call.find(Project, ref)
    if row is None:
        raise not_found(Project, ref)
    try:
        authorise(call.actor, call.action, Resource(project_id=row.id))
    except NotFound as error:
        raise not_found(Project, ref) from error
    return (row.id,)


def _position(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        wrong = FieldError(pointer="/after", detail="a position is a whole number", source="query")
        raise EventPositionInvalid(wrong.detail, errors=(wrong,))
    return int(text)
