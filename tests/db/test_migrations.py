"""The migrations lead to the schema of the models, and a database from the future is left alone."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from controlplane import migrate


async def test_an_empty_database_becomes_the_models(empty_database_url: str) -> None:
    assert await migrate.upgrade(empty_database_url) == (None, migrate.head())
    assert await migrate.differences(empty_database_url) == []
    assert await migrate.upgrade(empty_database_url) == (migrate.head(), migrate.head())


async def test_named_checks_are_in_the_migrations_too(empty_database_url: str, database_url: str) -> None:
    await migrate.upgrade(empty_database_url)
    query = """
        SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
        WHERE connamespace = 'public'::regnamespace AND conrelid <> 'alembic_version'::regclass ORDER BY 1, 2"""
    indexes = "SELECT indexdef FROM pg_indexes WHERE schemaname = 'public' AND tablename <> 'alembic_version' ORDER BY 1"
    columns = """
        SELECT table_name, column_name, data_type, is_nullable, column_default, is_identity, identity_generation
        FROM information_schema.columns WHERE table_schema = 'public' AND table_name <> 'alembic_version' ORDER BY 1, 2"""
    sequences = "SELECT sequencename, data_type::text FROM pg_sequences WHERE schemaname = 'public' ORDER BY 1"
    migrated, made = await asyncpg.connect(empty_database_url), await asyncpg.connect(database_url)
    try:
        made_query = query.replace("'alembic_version'::regclass", "0")
        assert await migrated.fetch(query) == await made.fetch(made_query)
        assert await migrated.fetch(indexes) == await made.fetch(indexes)
        assert await migrated.fetch(columns) == await made.fetch(columns)
        assert await migrated.fetch(sequences) == await made.fetch(sequences)
    finally:
        await migrated.close()
        await made.close()


async def test_two_at_once_migrate_once(empty_database_url: str) -> None:
    befores = await asyncio.gather(migrate.upgrade(empty_database_url), migrate.upgrade(empty_database_url))
    assert sorted(befores, key=str) == sorted([(None, migrate.head()), (migrate.head(), migrate.head())], key=str)


async def test_a_newer_database_is_refused(empty_database_url: str) -> None:
    await migrate.upgrade(empty_database_url)
    connection = await asyncpg.connect(empty_database_url)
    await connection.execute("UPDATE alembic_version SET version_num = '29990101_0000'")
    await connection.close()
    with pytest.raises(migrate.MigrationRefused, match="newer version"):
        await migrate.upgrade(empty_database_url)
    assert await migrate.current(empty_database_url) == "29990101_0000"
