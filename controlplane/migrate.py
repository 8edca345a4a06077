"""Brings the database to the schema of this code: `python -m controlplane.migrate [upgrade|current|revision]`.

The one rule: schemas go forward only; a database that is newer than the code is refused and left alone.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy.ext.asyncio import create_async_engine

import migrations
from controlplane.models.all import metadata
from controlplane.models.usage import PARTITION
from controlplane.settings import Settings

_LOCK = 0x6265_6470_6C61_7465  # pg_advisory_lock: "bedplate"; one migration at a time
T = TypeVar("T")


class MigrationRefused(RuntimeError):
    """The database cannot be brought to this code's schema; nothing was changed."""


def configuration() -> Config:
    config = Config()
    config.set_main_option("script_location", next(iter(migrations.__path__)).replace("%", "%%"))
    config.set_main_option("file_template", "%%(rev)s_%%(slug)s")
    return config


def head() -> str:
    """The revision this code needs."""
    revision = ScriptDirectory.from_config(configuration()).get_current_head()
    if revision is None:
        raise MigrationRefused("this installation carries no migrations")
    return revision


def known_revisions() -> frozenset[str]:
    """Every revision that this code can bring to its own."""
    return frozenset(script.revision for script in ScriptDirectory.from_config(configuration()).walk_revisions())


async def _with_connection(url: str, work: Callable[[sa.Connection], T]) -> T:
    engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://", 1))
    try:
        async with engine.connect() as connection:
            result = await connection.run_sync(work)
            await connection.commit()
            return result
    finally:
        await engine.dispose()


def _current(connection: sa.Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _upgrade(connection: sa.Connection) -> tuple[str | None, str]:
    connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    config = configuration()
    config.attributes["connection"] = connection
    before = _current(connection)
    if before is not None and before not in known_revisions():
        raise MigrationRefused(
            f"the database is at revision {before}, which this version of Bedplate does not know: "
            "a newer version has used it. Install that version, or restore a backup made before it"
        )
    command.upgrade(config, "head")
    return before, head()


async def upgrade(url: str) -> tuple[str | None, str]:
    """Bring the database to head in one transaction; returns the revision before and after. Raises MigrationRefused."""
    return await _with_connection(url, _upgrade)


async def current(url: str) -> str | None:
    return await _with_connection(url, _current)


def is_migrated(name: str | None, kind: str, parents: object) -> bool:
    """Whether migrations look after this table; alembic asks. Day partitions come and go with use."""
    del parents
    return kind != "table" or name is None or PARTITION.fullmatch(name) is None


async def differences(url: str) -> list[str]:
    """What differs between a migrated database and the models, in words; empty when nothing does."""

    def compare(connection: sa.Connection) -> list[str]:
        options = {"compare_type": True, "compare_server_default": True, "include_name": is_migrated}
        context = MigrationContext.configure(connection, opts=options)
        return [repr(difference) for difference in compare_metadata(context, metadata)]

    return await _with_connection(url, compare)


async def make_revision(url: str, message: str) -> Path | None:
    """Write a migration from the database's schema to the models'; None when they are equal."""

    def write(connection: sa.Connection) -> Path | None:
        config = configuration()
        config.attributes["connection"] = connection
        stamp = datetime.now(tz=UTC).strftime("%Y%m%d_%H%M")
        script = command.revision(config, message=message, rev_id=stamp, autogenerate=True)
        path = getattr(script, "path", None)
        return Path(path) if isinstance(path, str) else None

    return await _with_connection(url, write)


def _format(path: Path) -> None:
    for argv in (["check", "--fix", "--select", "I,F401", "-q"], ["format", "-q"]):
        subprocess.run(["ruff", *argv, str(path)], check=False)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m controlplane.migrate", description=__doc__)
    parser.add_argument("command", nargs="?", choices=("upgrade", "current", "revision"), default="upgrade")
    parser.add_argument("-m", "--message", default="change", help="what the new revision does")
    chosen = parser.parse_args(arguments)
    url = Settings().database.url
    if not url:
        print("BEDPLATE_DATABASE__URL says which database to migrate; it is empty", file=sys.stderr)
        return 2
    try:
        if chosen.command == "upgrade":
            before, after = asyncio.run(upgrade(url))
            print(f"database at revision {after}" + (" already" if before == after else f" (was {before or 'empty'})"))
        elif chosen.command == "current":
            print(asyncio.run(current(url)) or "empty")
        elif path := asyncio.run(make_revision(url, chosen.message)):
            _format(path)
            print(path)
    except (MigrationRefused, CommandError) as error:
        print(f"cannot migrate: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
