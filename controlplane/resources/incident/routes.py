"""`/v1/incidents`: what needs a person."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query

from controlplane.api.frame import Call, Noun
from controlplane.api.schemas import Listing
from controlplane.models.incident import Incident
from controlplane.resources.incident import queries, service
from controlplane.resources.incident.errors import IncidentNotFound
from controlplane.resources.incident.schemas import IncidentPage, IncidentResolve, IncidentView

noun = Noun("incident", "incidents", in_project=False, has_operations=False)
router = noun.router

IncidentId = Annotated[str, Path(description="The id of the incident.", examples=["inc_01jd2x4k3fe8v9m2q7t5w0y6za"])]


@noun.list(IncidentView)
async def list_(call: Call, page: Annotated[IncidentPage, Query()]) -> Listing[IncidentView]:
    """List incidents."""
    found = await call.page(Incident, page, *queries.in_state(page.state), fields=["code", "subject", "program", "last_at"])
    return Listing(items=[view(item) for item in found.items], next_page_token=found.next_page_token)


@noun.show(IncidentView, errors=[IncidentNotFound])
async def show(call: Call, incident: IncidentId) -> IncidentView:
    """Show one incident."""
    return view(await call.load(Incident, incident))


@noun.action("resolve", IncidentView, errors=[IncidentNotFound])
async def resolve(call: Call, incident: IncidentId, body: IncidentResolve | None = None) -> IncidentView:
    """Close an incident and, unless told otherwise, let its parked run try again."""
    row = await call.load(Incident, incident)
    wanted = body or IncidentResolve()
    await service.resolve(call.session, row, actor=call.actor, now=call.services.clock.now(), resume=wanted.resume)
    return view(row)


def view(row: Incident) -> IncidentView:
    state = "open" if row.resolved_at is None else "resolved"
    values = {name: getattr(row, name) for name in IncidentView.model_fields if name != "state"}
    return IncidentView(state=state, **values)
