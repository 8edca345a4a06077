"""A statement of the API that hangs is cancelled, and the client hears that it may try again."""

from __future__ import annotations

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from controlplane.api.problems import translate
from controlplane.core.errors import Unavailable
from controlplane.kernel.database import Database


async def test_what_takes_too_long_is_cancelled(database_url: str) -> None:
    database = await Database.open(database_url, statement_seconds=0.2)
    try:
        with pytest.raises(asyncpg.QueryCanceledError):
            await database.pool.execute("SELECT pg_sleep(20)")
        with pytest.raises(DBAPIError) as cut:
            async with database.session() as session:
                await session.execute(text("SELECT pg_sleep(20)"))
        assert isinstance(translate(cut.value), Unavailable)
        async with database.session() as session:
            assert await session.scalar(text("SELECT 1")) == 1
    finally:
        await database.close()


async def test_workers_are_not_limited(database_url: str) -> None:
    database = await Database.open(database_url)
    assert await database.pool.fetchval("SHOW statement_timeout") == "0"
    await database.close()
