"""Reading what became of documents, for the conditions of their objects. The one rule: one query for a page of objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.host import Host
from controlplane.models.host_document import HostDocument


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """A host that has not carried out an object's document; `code` and `detail` when it refused."""

    host: str
    link: str
    code: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One condition."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    since: Any = None


def applied(is_settled: bool, behind: Sequence[Behind]) -> Said:
    """Whether the hosts carry out what is wanted."""
    for one in behind:
        if one.code:
            return Said(type="Applied", status="false", reason=one.code, message=f"{one.host}: {one.detail}")
    if lost := [one.host for one in behind if one.link == "lost"]:
        words = f"{', '.join(lost[:5])} does not answer; what it was told before still holds there."
        return Said(type="Applied", status="false", reason="host.unreachable", message=words)
    if behind or not is_settled:
        names = ", ".join(one.host for one in behind[:5]) or "hosts"
        return Said(type="Applied", status="false", reason="in_progress", message=f"The last change is on its way to {names}.")
    return Said(type="Applied", status="true")


async def behind_on(session: AsyncSession, kind: str, object_ids: Sequence[str]) -> dict[str, list[Behind]]:
    """For each object the hosts that have not carried out its document."""
    query = (
        select(HostDocument.object_id, Host.name, Host.link, HostDocument.failure, HostDocument.detail)
        .join(Host, Host.id == HostDocument.host_id)
        .where(HostDocument.kind == kind, HostDocument.object_id.in_(object_ids))
        .where(HostDocument.applied_generation < HostDocument.generation)
        .order_by(HostDocument.object_id, Host.name)
    )
    found: dict[str, list[Behind]] = {}
    for row in await session.execute(query):
        found.setdefault(row[0], []).append(Behind(host=row[1], link=row[2], code=row[3], detail=row[4]))
    return found


def holding(*, is_standby: bool = False) -> ColumnElement[bool]:
    """Of documents of addresses: those of hosts that hold them, or of hosts that only stand by. All other kinds hold."""
    standby_for = func.coalesce(HostDocument.document["standby_for"].astext, "")
    return standby_for != "" if is_standby else standby_for == ""


async def holders_of(
    session: AsyncSession, kind: str, object_ids: Sequence[str], *, is_standby: bool = False
) -> dict[str, list[str]]:
    """The names of the hosts that have carried out each object's document."""
    query = (
        select(HostDocument.object_id, Host.name)
        .join(Host, Host.id == HostDocument.host_id)
        .where(HostDocument.kind == kind, HostDocument.object_id.in_(object_ids), HostDocument.is_wanted)
        .where(HostDocument.applied_generation > 0, holding(is_standby=is_standby))
        .order_by(HostDocument.object_id, Host.name)
    )
    found: dict[str, list[str]] = {}
    for object_id, name in await session.execute(query):
        found.setdefault(object_id, []).append(name)
    return found
