"""Throw-away databases with the whole schema: emptied and used again, because making one costs more than most tests.

The one rule: what a test gets equals a new database. One whose schema a test has changed, or that has grown, is dropped.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator

import asyncpg
from sqlalchemy.ext.asyncio import create_async_engine

from controlplane.embedded.postgres import Postgres

_TEMPLATE = "bedplate_template"
_KEPT_BYTES = 4 << 20
_LEAVE = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""
_HAS_GROWN = "SELECT pg_database_size(current_database()) - pg_database_size($1) > $2"
_SCHEMA = """
WITH own AS (SELECT * FROM pg_class WHERE relnamespace = 'public'::regnamespace)
SELECT md5(concat_ws(' ',
  (SELECT string_agg(format('%s %s %s %s', oid, relname, relkind, reloptions), ' ' ORDER BY oid) FROM own),
  (SELECT string_agg(format('%s %s %s %s %s', attname, atttypid, attnotnull, atthasdef, attisdropped), ' '
     ORDER BY attrelid, attnum) FROM pg_attribute WHERE attrelid IN (SELECT oid FROM own)),
  (SELECT string_agg(format('%s %s', oid, convalidated), ' ' ORDER BY oid) FROM pg_constraint),
  (SELECT string_agg(format('%s %s', oid, tgenabled), ' ' ORDER BY oid) FROM pg_trigger),
  (SELECT string_agg(format('%s %s', indexrelid, indisvalid), ' ' ORDER BY indexrelid) FROM pg_index),
  (SELECT string_agg(format('%s %s', oid, xmin), ' ' ORDER BY oid) FROM pg_proc WHERE oid >= 16384),
  (SELECT string_agg(oid::text, ' ' ORDER BY oid) FROM pg_type WHERE oid >= 16384),
  (SELECT string_agg(nspname, ' ' ORDER BY oid) FROM pg_namespace WHERE nspname !~ '^pg_(toast_)?temp_')))
"""
_EMPTY = """
DO $$
DECLARE name text; full_ones text[]; is_full bool;
BEGIN
  FOR name IN SELECT oid::regclass FROM pg_class
    WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' AND pg_relation_size(oid) > 0
  LOOP
    EXECUTE format('SELECT EXISTS (SELECT FROM %s)', name) INTO is_full;
    IF is_full THEN full_ones := full_ones || name; END IF;
  END LOOP;
  IF full_ones IS NOT NULL THEN
    EXECUTE format('TRUNCATE %s CASCADE', array_to_string(full_ones, ', '));
  END IF;
  PERFORM setval(format('%I.%I', schemaname, sequencename), start_value, false) FROM pg_sequences WHERE last_value IS NOT NULL;
END $$
"""


class Databases:
    """Those of one server, in the session that started it."""

    def __init__(self, server: Postgres) -> None:
        self._server = server
        self._free: list[str] = []
        self._schema = ""

    async def prepare(self) -> None:
        from controlplane.models.all import metadata

        async with self._inside("postgres") as admin:
            await admin.execute(f"CREATE DATABASE {_TEMPLATE}")
        engine = create_async_engine(self._server.url(_TEMPLATE).replace("postgresql://", "postgresql+asyncpg://"))
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        await engine.dispose()
        async with self._inside(_TEMPLATE) as connection:
            self._schema = await connection.fetchval(_SCHEMA)

    @contextlib.asynccontextmanager
    async def whole(self) -> AsyncIterator[str]:
        """URL of a database with every table and no row."""
        if not self._free:
            self._free.append(await self._create(_TEMPLATE))
        name = self._free.pop()
        try:
            yield self._server.url(name)
        finally:
            if await self._is_empty_again(name):
                self._free.append(name)
            else:
                await self._drop(name)

    @contextlib.asynccontextmanager
    async def empty(self) -> AsyncIterator[str]:
        """URL of a database without any table."""
        name = await self._create("template1")
        try:
            yield self._server.url(name)
        finally:
            await self._drop(name)

    async def _create(self, template: str) -> str:
        name = f"test_{uuid.uuid4().hex}"
        async with self._inside("postgres") as admin:
            await admin.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    async def _drop(self, name: str) -> None:
        async with self._inside("postgres") as admin:
            await admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    async def _is_empty_again(self, name: str) -> bool:
        """Without whoever is still connected; False where only a new one is like a new one."""
        try:
            async with self._inside(name) as connection:
                await connection.execute(_LEAVE)
                if await connection.fetchval(_HAS_GROWN, _TEMPLATE, _KEPT_BYTES):
                    return False
                if await connection.fetchval(_SCHEMA) != self._schema:
                    return False
                await connection.execute(_EMPTY)
        except (OSError, asyncpg.PostgresError):  # the server was restarted, the database renamed, a lock is prepared …
            return False
        return True

    @contextlib.asynccontextmanager
    async def _inside(self, name: str) -> AsyncIterator[asyncpg.Connection]:
        connection = await asyncpg.connect(self._server.url(name))
        try:
            yield connection
        finally:
            await connection.close()
