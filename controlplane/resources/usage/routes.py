"""`/v1/projects/{project}/usage`: what the gateway served, by hour, key and model."""

from __future__ import annotations

import csv
import io
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import Query, Response
from pydantic import AwareDatetime

from controlplane.api.frame import Call, Noun
from controlplane.core.errors import FieldError
from controlplane.resources.usage import queries
from controlplane.resources.usage.errors import UsageRangeInvalid
from controlplane.resources.usage.schemas import UsageList, UsageRecordList, UsageRecordView, UsageView

noun = Noun("usage", "usage", has_operations=False)
router = noun.router

_MOST = timedelta(days=62)

Since = Annotated[
    AwareDatetime | None, Query(description="From this hour on; default: 24 hours ago.", examples=["2026-11-30T00:00:00Z"])
]
Until = Annotated[
    AwareDatetime | None, Query(description="Up to, not including; default: now.", examples=["2026-12-01T00:00:00Z"])
]
OfModel = Annotated[str | None, Query(max_length=128, description="Only this public model name.", examples=["smollm2"])]
OfKey = Annotated[str | None, Query(max_length=128, description="Only this key, by name or id.", examples=["app"])]
By = Annotated[Literal["hour", "total"], Query(description="One row an hour, or one for the whole time.", examples=["hour"])]
Limit = Annotated[int, Query(ge=1, le=1000, description="Most records.", examples=[100])]


@noun.route("GET", "", "list", UsageList, errors=[UsageRangeInvalid])
async def list_(
    call: Call, *, since: Since = None, until: Until = None, model: OfModel = None, key: OfKey = None, by: By = "hour"
) -> UsageList:
    """List sums of requests and tokens."""
    asked = _asked(call, since, until, model, key)
    rows = await queries.sums(call.session, asked, is_hourly=by == "hour")
    return UsageList(items=[UsageView.model_validate(row) for row in rows])


@noun.route("GET", "/records", "records", UsageRecordList, errors=[UsageRangeInvalid])
async def records(
    call: Call, *, since: Since = None, until: Until = None, model: OfModel = None, key: OfKey = None, limit: Limit = 100
) -> UsageRecordList:
    """List the latest requests one by one."""
    rows = await queries.records(call.session, _asked(call, since, until, model, key), limit)
    return UsageRecordList(items=[UsageRecordView.model_validate(row) for row in rows])


@noun.route(
    "GET",
    "/export",
    "export",
    None,
    errors=[UsageRangeInvalid],
    answers={200: {"content": {"text/csv": {}}, "description": "The same sums, a line each."}},
    response_class=Response,
)
async def export(
    call: Call, *, since: Since = None, until: Until = None, model: OfModel = None, key: OfKey = None, by: By = "hour"
) -> Response:
    """Export sums as CSV (RFC 4180), with a header line."""
    rows = await queries.sums(call.session, _asked(call, since, until, model, key), is_hourly=by == "hour")
    text = io.StringIO()
    names = list(UsageView.model_fields)
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(_guarded(UsageView.model_validate(row).model_dump(mode="json")) for row in rows)
    headers = {"content-disposition": 'attachment; filename="usage.csv"'}
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8", headers=headers)


def _guarded(row: dict[str, Any]) -> dict[str, Any]:
    """Names that a spreadsheet would take for a formula are quoted."""
    return {
        name: f"'{value}" if isinstance(value, str) and value[:1] in {"=", "+", "-", "@"} else value
        for name, value in row.items()
    }


def _asked(call: Call, since: datetime | None, until: datetime | None, model: str | None, key: str | None) -> queries.Asked:
    until = until or call.services.clock.now() + timedelta(hours=1)
    since = since or until - timedelta(hours=25)
    if not since < until <= since + _MOST:
        detail = f"from {since.isoformat()} until {until.isoformat()}"
        raise UsageRangeInvalid(detail, errors=(FieldError(pointer="/until", detail="must be after since", source="query"),))
    return queries.Asked(project_id=call.project_id, since=since, until=until, model=model, key=key)
