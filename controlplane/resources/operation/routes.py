"""`/v1/operations`: what changes are doing, and a long poll to wait for one."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated

from fastapi import Path, Query

from controlplane.api.frame import Call, Noun, Page
from controlplane.api.schemas import Listing
from controlplane.core.errors import FieldError, InvalidInput
from controlplane.kernel.operation import Past, settle, steps_of
from controlplane.models.operation import Operation
from controlplane.models.run import Run
from controlplane.resources.operation.errors import OperationNotFound
from controlplane.resources.operation.schemas import OperationView, StepView

noun = Noun("operation", "operations", in_project=False, has_operations=False)
router = noun.router

_WAIT = re.compile(r"(\d{1,6})(ms|s|m)")
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0}
_MAX_WAIT_SECONDS = 60.0
_FIRST_LOOK_SECONDS, _LAST_LOOK_SECONDS = 0.1, 1.0

OperationId = Annotated[str, Path(description="The id of the operation.", examples=["op_01jd2x4k3fe8v9m2q7t5w0y6za"])]
Wait = Annotated[
    str, Query(description="Answer when it has ended, or after this time: `500ms`, `30s`, `1m` at most.", examples=["30s"])
]
Seen = Annotated[str | None, Query(description="With `wait`: answer also when the step is another one.", examples=["prepare"])]


@noun.list(OperationView)
async def list_(call: Call, page: Page) -> Listing[OperationView]:
    """List operations, those of your project or, for operators, all."""
    fields = ["action", "state", "subject_kind", "subject_id", "project_id", "actor"]
    found = await call.page(Operation, page, fields=fields)
    runs = await settle(call.session, found.items)
    items = [view(item, runs.get(item.subject_id)) for item in found.items]
    return Listing(items=items, next_page_token=found.next_page_token)


@noun.show(OperationView, errors=[OperationNotFound])
async def show(call: Call, operation: OperationId, wait: Wait = "0s", seen: Seen = None) -> OperationView:
    """Show one operation; with `wait` not before it has ended or the time is up."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + _seconds(wait)
    pause = _FIRST_LOOK_SECONDS
    while True:
        row = await call.load(Operation, operation)
        await call.session.refresh(row)
        runs = await settle(call.session, [row])
        answer = view(row, runs.get(row.subject_id))
        is_new_step = seen is not None and answer.steps[-1:] != [] and answer.steps[-1].name != seen
        if answer.state != "running" or is_new_step or loop.time() >= ends_at or call.services.events.is_closed:
            return answer
        await call.release()
        await asyncio.sleep(min(pause, max(0.0, ends_at - loop.time())))
        pause = min(pause * 1.5, _LAST_LOOK_SECONDS)


def view(row: Operation, run: Run | None) -> OperationView:
    """What it went through, and while it runs the step that its run is in."""
    live = run if row.state == "running" else None
    steps = [_past(Past.of(entry)) for entry in (row.steps if live is None else steps_of(row, live))]
    if row.state == "failed" and steps and steps[-1].state == "failed":
        steps[-1].error = row.error_detail
    if live is not None and live.parked_at is None:
        steps.append(_present(row, live))
    values = {name: getattr(row, name) for name in OperationView.model_fields if name != "steps"}
    return OperationView(steps=steps, **values)


def _past(step: Past) -> StepView:
    return StepView(
        name=step.name,
        state=step.state if step.state in {"failed", "cut"} else "done",
        started_at=step.started_at,
        finished_at=step.finished_at,
        attempt=step.tries,
        error_code=step.code,
    )


def _present(row: Operation, run: Run) -> StepView:
    return StepView(
        name=run.step,
        state="running",
        started_at=max(run.entered_at, row.created_at),
        attempt=run.failures + 1,
        deadline_at=run.deadline_at,
        error=run.last_error,
        error_code=run.failed_code,
    )


def _seconds(text: str) -> float:
    match = _WAIT.fullmatch(text)
    seconds = float(match[1]) * _UNIT_SECONDS[match[2]] if match else -1.0
    if not 0 <= seconds <= _MAX_WAIT_SECONDS:
        detail = f"{text!r} is not a time from 0s to 60s, like 500ms, 30s or 1m"
        raise InvalidInput(detail, errors=(FieldError(pointer="/wait", detail=detail, source="query"),))
    return seconds
