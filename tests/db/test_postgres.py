"""The embedded PostgreSQL answers, and only over its socket."""

from __future__ import annotations

import asyncpg

from controlplane.embedded.postgres import Postgres


async def test_answers_over_its_socket(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        assert await connection.fetchval("SELECT current_setting('listen_addresses')") == ""
        assert await connection.fetchval("SELECT current_user") == "bedplate"
    finally:
        await connection.close()


def test_pid_of_another_program_is_not_believed(postgres: Postgres, tmp_path) -> None:
    import os

    other = Postgres(directory=tmp_path)
    other.data_directory.mkdir()
    (other.data_directory / "postmaster.pid").write_text(f"{os.getpid()}\n")
    assert other.pid() is None
    assert postgres.pid() is not None
