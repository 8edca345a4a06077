"""Lists by keyset: sorted by (a column, id), so pages never skip or repeat a row that stays.

The one rule: only columns that are NOT NULL may be sorted by. Filters are `field=value`, `field!=value` or `field~part`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Boolean, ColumnElement, Integer, Select, String, and_, or_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from controlplane.core import paging
from controlplane.core.errors import FieldError, InvalidInput
from controlplane.core.paging import PageTokenInvalid
from controlplane.models.base import Base

Row = TypeVar("Row", bound=Base)
Item = TypeVar("Item")

_FILTER = re.compile(r"([a-z][a-z0-9_.]*)(!=|=|~)(.*)", re.DOTALL)


class PageQuery(BaseModel):
    """The query parameters of every list."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(default=100, ge=1, le=1000, description="Most items on a page.", examples=[100])
    page_token: str | None = Field(
        default=None, max_length=4096, description="From `next_page_token`.", examples=["WzEsImlkIl0"]
    )
    sort: str = Field(
        default="id", max_length=64, description="A field; with `-` in front descending.", examples=["-created_at"]
    )
    filter: list[str] = Field(
        default_factory=list,
        max_length=16,
        description="`field=value`, `field!=value` or `field~part`; several must all hold. `labels.KEY=value` reads a label.",
        examples=[["name~web"]],
    )


Page = Annotated[PageQuery, Query()]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOf(Generic[Item]):
    """One page as a handler returns it: rows, or what shows them."""

    items: Sequence[Item]
    next_page_token: str | None


def _wrong(name: str, detail: str) -> InvalidInput:
    return InvalidInput(detail, errors=(FieldError(pointer=f"/{name}", detail=detail, source="query"),))


def _columns(model: type[Base], fields: Sequence[str]) -> Mapping[str, InstrumentedAttribute[Any]]:
    standard = ("id", "name", "created_at", "updated_at", "generation")
    return {name: getattr(model, name) for name in (*standard, *fields) if hasattr(model, name)}


def _parsed(column: ColumnElement[Any], value: str | int, name: str) -> Any:
    python = column.type.python_type
    try:
        if isinstance(column.type, Boolean):
            return {"true": True, "false": False}[str(value)]
        if isinstance(column.type, Integer):
            return _bounded(int(value))
        return datetime.fromisoformat(str(value)) if python is datetime else str(value)
    except (ValueError, KeyError) as error:
        raise _wrong("filter", f"{value!r} does not fit the field {name}") from error


def _bounded(value: int) -> int:
    if abs(value) >= 1 << 63:
        raise ValueError("larger than the database's integers")
    return value


def _condition(model: type[Base], columns: Mapping[str, InstrumentedAttribute[Any]], expression: str) -> ColumnElement[bool]:
    match = _FILTER.fullmatch(expression)
    if match is None or "\0" in expression:
        raise _wrong("filter", f"{expression!r} is not field=value, field!=value or field~part")
    name, operator, value = match.groups()
    column: Any
    if name.startswith("labels.") and hasattr(model, "labels"):
        column = getattr(model, "labels")[name.removeprefix("labels.")].astext  # noqa: B009 - not every model has labels
    elif name in columns:
        column = columns[name]
    else:
        raise _wrong("filter", f"cannot filter by {name}; fields: {', '.join(sorted(columns))}")
    if operator == "~" and not isinstance(column.type, String):
        raise _wrong("filter", f"~ looks into text, and {name} is none")
    if operator == "~":
        return column.icontains(value, autoescape=True)
    wanted = _parsed(column, value, name)
    return column == wanted if operator == "=" else column.is_distinct_from(wanted)


async def page_of(
    session: AsyncSession, model: type[Row], query: Select[Row], page: PageQuery, *, fields: Sequence[str] = ()
) -> PageOf[Row]:
    """One page of `query`; `fields` may be sorted and filtered by, besides id, name, times and generation.

    Raises InvalidInput and PageTokenInvalid.
    """
    columns = _columns(model, fields)
    name = page.sort.removeprefix("-")
    if name not in columns or columns[name].expression.nullable:
        allowed = ", ".join(key for key, column in columns.items() if not column.expression.nullable)
        raise _wrong("sort", f"cannot sort by {name or 'nothing'}; fields: {allowed}")
    by, tie, is_descending = columns[name], columns["id"], page.sort.startswith("-")
    for expression in page.filter:
        query = query.where(_condition(model, columns, expression))
    if page.page_token:
        query = query.where(_after(page, by, tie, name))
    order = (by.desc(), tie.desc()) if is_descending else (by.asc(), tie.asc())
    rows = list(await session.scalars(query.order_by(None).order_by(*order).limit(page.limit + 1)))
    if len(rows) <= page.limit:
        return PageOf(items=rows, next_page_token=None)
    rows = rows[: page.limit]
    last = getattr(rows[-1], name)
    value = last.isoformat() if isinstance(last, datetime) else last
    return PageOf(items=rows, next_page_token=paging.encode(page.sort, value, str(rows[-1].id)))  # pyright: ignore[reportAttributeAccessIssue]


def _after(page: PageQuery, by: InstrumentedAttribute[Any], tie: InstrumentedAttribute[Any], name: str) -> ColumnElement[bool]:
    sort, value, last_id = paging.decode(page.page_token or "", parts=3)
    if sort != page.sort:
        raise PageTokenInvalid("the page token belongs to a list with another sort")
    try:
        last = _parsed(by.expression, value, name)
    except InvalidInput as error:
        raise PageTokenInvalid from error
    if page.sort.startswith("-"):
        return or_(by < last, and_(by == last, tie < str(last_id)))
    return or_(by > last, and_(by == last, tie > str(last_id)))
