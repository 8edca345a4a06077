"""Reads of usage. The one rule: sums come from the hourly table, never from the records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, func, null, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.key import Key
from controlplane.models.usage import UsageHour, UsageRecord

_SUMS = (
    "requests",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "cost_micros",
    "estimated_requests",
    "unbilled_requests",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`key` is a name or an id. Sums begin with the whole hour of `since`."""

    project_id: str
    since: datetime
    until: datetime
    model: str | None = None
    key: str | None = None


async def sums(session: AsyncSession, asked: Asked, *, is_hourly: bool) -> Sequence[Any]:
    """One row an hour (or one for the whole time), model and key."""
    since = asked.since.replace(minute=0, second=0, microsecond=0)
    hour: ColumnElement[Any] = UsageHour.hour.expression if is_hourly else null()
    groups = [UsageHour.model, UsageHour.key_id, Key.name] + ([UsageHour.hour] if is_hourly else [])
    query = (
        select(
            hour.label("hour"),
            UsageHour.model,
            UsageHour.key_id,
            Key.name.label("key"),
            *(func.sum(getattr(UsageHour, name)).label(name) for name in _SUMS),
        )
        .outerjoin(Key, Key.id == UsageHour.key_id)
        .where(UsageHour.project_id == asked.project_id, UsageHour.hour >= since, UsageHour.hour < asked.until)
        .group_by(*groups)
        .order_by(*([UsageHour.hour] if is_hourly else []), UsageHour.model, UsageHour.key_id)
    )
    if asked.model is not None:
        query = query.where(UsageHour.model == asked.model)
    if asked.key is not None:
        query = query.where((UsageHour.key_id == asked.key) | (Key.name == asked.key))
    return (await session.execute(query)).all()


async def records(session: AsyncSession, asked: Asked, limit: int) -> Sequence[UsageRecord]:
    """The latest records; `day` is named too, so that only its partitions are read."""
    query = (
        select(UsageRecord)
        .where(
            UsageRecord.project_id == asked.project_id,
            UsageRecord.day >= (asked.since - timedelta(days=1)).date(),
            UsageRecord.day <= asked.until.date(),
            UsageRecord.started_at >= asked.since,
            UsageRecord.started_at < asked.until,
        )
        .order_by(UsageRecord.started_at.desc())
        .limit(limit)
    )
    if asked.model is not None:
        query = query.where(UsageRecord.model == asked.model)
    if asked.key is not None:
        query = query.outerjoin(Key, Key.id == UsageRecord.key_id).where(
            (UsageRecord.key_id == asked.key) | (Key.name == asked.key)
        )
    return list(await session.scalars(query))
