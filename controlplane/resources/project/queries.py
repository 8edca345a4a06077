"""Reads of projects."""

from __future__ import annotations

from sqlalchemy import Table, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.base import Base
from controlplane.models.project import Project


def _tables_inside() -> list[Table]:
    """Every table whose rows keep a project alive: those with a foreign key to it that does not cascade."""
    project = Project.__table__
    return [
        table
        for table in Base.metadata.sorted_tables
        if any(key.column.table is project and key.ondelete != "CASCADE" for key in table.foreign_keys)
    ]


async def contents(session: AsyncSession, project_id: str) -> dict[str, int]:
    """How many rows of each kind the project holds; kinds without any are left out."""
    found: dict[str, int] = {}
    for table in _tables_inside():
        count = await session.scalar(select(func.count()).select_from(table).where(table.c.project_id == project_id))
        if count:
            found[str(table.name)] = count
    return found
