"""Dumping a database and loading it into an empty one, by PostgreSQL's own programs.

The one rule: a load is one transaction that ends with the raised epoch, so a load that was cut leaves the database empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit, urlunsplit

import asyncpg

from controlplane import migrate
from controlplane.backup.archive import BackupUnusable
from controlplane.embedded.postgres import wheel_programs

_CHUNK_BYTES = 1 << 20
_SHA256 = re.compile("[0-9a-f]{64}")

AFTER = """
-- What was told to hosts before is told again, under an epoch that none of them has seen.
UPDATE public.deployment SET epoch = GREATEST(epoch + 1, {now});
UPDATE public.host_document SET applied_generation = 0;
UPDATE public.run SET wake_at = now() WHERE finished_at IS NULL AND parked_at IS NULL;
-- Images and artifacts are files beside the database: what is not here has to be given again.
DELETE FROM public.blob WHERE sha256 <> ALL ({images});
UPDATE public.image SET state = 'uploading', available_at = NULL WHERE state = 'available' AND EXISTS (
    SELECT FROM public.image_file f WHERE f.image_id = image.id AND f.sha256 NOT IN (SELECT sha256 FROM public.blob));
DELETE FROM public.stored_artifact WHERE sha256 <> ALL ({artifacts});
"""


class DatabaseRefused(RuntimeError):
    """The database cannot be dumped or loaded; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the present database says of itself; no revision: it is empty."""

    revision: str
    epoch: int
    server_major: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Where pg_dump, pg_restore and psql are."""

    directory: Path

    def path(self, name: str) -> str:
        return str(self.directory / name)

    @property
    def major(self) -> int:
        """Of PostgreSQL; 0 where the programs do not run."""
        try:
            done = subprocess.run([self.path("pg_dump"), "--version"], capture_output=True, text=True, check=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return 0
        found = re.search(r"(\d+)", done.stdout)
        return int(found.group(1)) if found else 0

    @classmethod
    def find(cls, embedded: Path | None, server_major: int) -> Programs:
        """Those that fit the server: of its version, else newer. Raises DatabaseRefused."""
        found = shutil.which("pg_dump")
        places = [place for place in (embedded, found and Path(found).parent, wheel_programs()) if place is not None]
        candidates = [cls(directory=Path(place)) for place in places if shutil.which("psql", path=str(place))]
        by_major = sorted((one.major, at) for at, one in enumerate(candidates))
        for major, at in by_major:
            if major >= server_major:
                return candidates[at]
        package = f"postgresql-client-{server_major}"
        raise DatabaseRefused(f"pg_dump, pg_restore and psql of PostgreSQL {server_major} are missing: install {package}")


def state_of(url: str) -> State:
    """Raises DatabaseRefused when it does not answer, or holds something else."""
    try:
        return asyncio.run(_state_of(url))
    except (OSError, asyncpg.PostgresError) as error:
        raise DatabaseRefused(f"the database does not answer: {error}") from error


async def _state_of(url: str) -> State:
    connection = await asyncpg.connect(url, timeout=10)
    try:
        tables, major = set(await _names(connection)), connection.get_server_version().major
        if not tables:
            return State(revision="", epoch=0, server_major=major)
        if "alembic_version" not in tables or "deployment" not in tables:
            raise DatabaseRefused("the database holds tables that are not Bedplate's")
        revision = await connection.fetchval("SELECT version_num FROM public.alembic_version")
        epoch = await connection.fetchval("SELECT epoch FROM public.deployment")
        return State(revision=revision or "", epoch=epoch or 1, server_major=major)
    finally:
        await connection.close()


async def _names(connection: asyncpg.Connection) -> list[str]:
    rows = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    return [str(row["tablename"]) for row in rows]


def dump(programs: Programs, url: str) -> Iterator[bytes]:
    """The whole database as of one moment, in PostgreSQL's custom format. Raises DatabaseRefused."""
    with _connection(url) as (target, environment), tempfile.TemporaryFile() as words:
        argv = [programs.path("pg_dump"), "--format=custom", "--no-owner", "--no-privileges", f"--dbname={target}"]
        with subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=words) as process:
            assert process.stdout is not None
            while chunk := process.stdout.read(_CHUNK_BYTES):
                yield chunk
        _check(process, words, "pg_dump")


def load(programs: Programs, url: str, chunks: Iterator[bytes], after: str) -> None:
    """Load a dump into an empty database and run `after`, or change nothing. Raises DatabaseRefused and what `chunks` does."""
    with _connection(url) as (target, environment), tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as said:
        make = [programs.path("pg_restore"), "--no-owner", "--no-privileges", "--exit-on-error", "--file=-"]
        take = [programs.path("psql"), "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--file=-", f"--dbname={target}"]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        with (
            subprocess.Popen(make, env=environment, stdin=pipe, stdout=pipe, stderr=told) as maker,
            subprocess.Popen(take, env=environment, stdin=pipe, stdout=nothing, stderr=said) as taker,
        ):
            feeding = _Feeding(maker, chunks)
            feeding.start()
            assert maker.stdout is not None
            assert taker.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # psql says why it ended
                taker.stdin.write(b"BEGIN;\n")
                shutil.copyfileobj(maker.stdout, taker.stdin, _CHUNK_BYTES)
                feeding.join()
                if maker.wait() == 0 and feeding.failure is None:
                    taker.stdin.write(f"{after}\nCOMMIT;\n".encode())
            with contextlib.suppress(BrokenPipeError):
                taker.stdin.close()
            maker.stdout.close()
            feeding.join()
        if feeding.failure is not None:
            raise feeding.failure
        _check(taker, said, "psql")
        _check(maker, told, "pg_restore")


class _Feeding(threading.Thread):
    """Writes the dump into pg_restore while its output is read; `failure` is what the source died of."""

    def __init__(self, process: subprocess.Popen[bytes], chunks: Iterator[bytes]) -> None:
        super().__init__(daemon=True)
        self._process, self._chunks = process, chunks
        self.failure: Exception | None = None

    def run(self) -> None:
        assert self._process.stdin is not None
        try:
            for chunk in self._chunks:
                self._process.stdin.write(chunk)
        except BrokenPipeError:  # pg_restore says why it ended
            pass
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits
            self.failure = error
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


def raised(*, images: Iterable[str], artifacts: Iterable[str]) -> str:
    """The statements that end a load. `images`, `artifacts`: digests of the files that this machine has in its stores."""
    return AFTER.format(now=int(time.time()), images=_array(images), artifacts=_array(artifacts))


def _array(digests: Iterable[str]) -> str:
    return "'{" + ",".join(sorted(digest for digest in digests if _SHA256.fullmatch(digest))) + "}'::text[]"


def check_revision(revision: str) -> None:
    """Raises BackupUnusable for a schema that this code does not know: a newer version made it."""
    if revision not in migrate.known_revisions():
        raise BackupUnusable(
            f"the backup's schema is {revision}, which this version of Bedplate does not know: a newer version made it. "
            "Install that version and restore there"
        )


def _check(process: subprocess.Popen[bytes], words: IO[bytes], name: str) -> None:
    if process.returncode != 0:
        words.seek(0)
        raise DatabaseRefused(f"{name} failed: {words.read(4000).decode(errors='replace').strip()}")


@contextlib.contextmanager
def _connection(url: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The URL without its password, and an environment in which libpq finds that in a file of ours, 0600."""
    parts = urlsplit(url)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    environment |= {"LC_ALL": "C.UTF-8", "PGAPPNAME": "bedplate-backup"}
    if parts.password is None:
        yield url, environment
        return
    host = parts.netloc.rpartition("@")[2]
    target = urlunsplit(parts._replace(netloc=f"{parts.username or ''}@{host}"))
    with tempfile.TemporaryDirectory(prefix="bedplate-backup-") as directory:
        path = Path(directory) / "pgpass"
        path.touch(mode=0o600)
        escaped = unquote(parts.password).replace("\\", "\\\\").replace(":", "\\:")
        path.write_text(f"*:*:*:*:{escaped}\n")
        yield target, {**environment, "PGPASSFILE": str(path)}
