"""`python -m controlplane.backup create | restore`: what `bedplate backup` runs, on the control plane's machine.

The one rule: nothing that is there is written over: neither a file, nor a database that holds anything.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

import asyncpg
from pydantic import ValidationError

import controlplane
from controlplane import migrate
from controlplane.backup import database, keys
from controlplane.backup.archive import BackupUnusable, Header, Reader, Writer, key_id
from controlplane.core.files import write_whole
from controlplane.embedded.postgres import PostgresFailed
from controlplane.embedded.services import Deployment
from controlplane.embedded.state import StateDirectory, StateUnusable
from controlplane.keyfile import KeyFileUnusable, is_own, master_key_path, read_master_key
from controlplane.settings import Settings

EXISTS = 5


class TargetRefused(RuntimeError):
    """What would be written is there already; the message names it."""


def create(deployment: Deployment, archive: Path, keys_file: Path | None, passphrase: str) -> Header:
    """Write both files. Raises TargetRefused, and what the parts raise; then neither file is left."""
    settings = deployment.settings
    _free(archive)
    held = keys.Keys(master_key=read_master_key(settings), operator_token=_operator_token(deployment.state))
    if keys_file is not None:
        _free(keys_file)
    with _server(deployment, is_for_load=False) as url:
        state = database.state_of(url)
        programs = _programs(deployment, state)
        if not state.revision:
            raise database.DatabaseRefused("there is nothing to back up: the database is empty")
        with _whole(archive) as file:
            made_at = datetime.now(UTC).isoformat(timespec="seconds")
            words = {"product": _product(), "revision": state.revision, "created_at": made_at}
            writer = Writer(file, held.sealer, epoch=state.epoch, **words)
            for chunk in database.dump(programs, url):
                writer.write(chunk)
            writer.finish()
    if keys_file is not None:
        try:
            keys.save(keys_file, held, passphrase)
        except OSError:
            archive.unlink(missing_ok=True)
            raise
    return writer.header


def restore(deployment: Deployment, archive: Path, keys_file: Path | None, passphrase: str, *, is_dry: bool) -> Header:
    """Check everything that can be, then load. Raises BackupUnusable, TargetRefused, and what the parts raise."""
    settings = deployment.settings
    reader = Reader(archive)
    database.check_revision(reader.header.revision)
    held = keys.load(keys_file, passphrase) if keys_file is not None else keys.Keys(master_key=read_master_key(settings))
    size_bytes = reader.verify(held.sealer)
    _say(f"{archive.name}: of {reader.header.created_at}, schema {reader.header.revision}, {size_bytes} bytes, whole")
    if is_dry:
        return reader.header
    _check_master_key(settings, held)
    with deployment.state.lock(), _server(deployment, is_for_load=True) as url:
        if (found := database.state_of(url)).revision:
            raise TargetRefused(
                f"the database is not empty (schema {found.revision}): restore to a fresh state directory (--state DIR)"
            )
        _put_keys(deployment, held)
        after = database.raised(
            images=_names(settings.state_dir / "images"), artifacts=_names(settings.state_dir / "artifacts")
        )
        database.load(_programs(deployment, found), url, reader.chunks(held.sealer), after)
        asyncio.run(migrate.upgrade(url))
        _tell_epoch(url, reader.header)
    return reader.header


def _check_master_key(settings: Settings, held: keys.Keys) -> None:
    """What this machine would run with must be the backup's key, or be missing at our own place."""
    if is_own(settings) and not master_key_path(settings).exists():
        return
    present = keys.Keys(master_key=read_master_key(settings))
    if key_id(present.sealer) != key_id(held.sealer):
        place = "master_key_command" if settings.master_key_command else str(master_key_path(settings))
        raise TargetRefused(
            f"this machine has another master key ({place}) than the backup: put the backup's there, or remove it"
        )


def _put_keys(deployment: Deployment, held: keys.Keys) -> None:
    settings = deployment.settings
    if is_own(settings) and not master_key_path(settings).exists():
        write_whole(master_key_path(settings), held.master_key)
    if held.operator_token and not deployment.state.token_file.exists():
        write_whole(deployment.state.token_file, f"{held.operator_token}\n".encode())


def _tell_epoch(url: str, header: Header) -> None:
    now = database.state_of(url)
    _say(f"epoch {header.epoch} became {now.epoch}: hosts refuse the control plane that this backup is of")
    waiting = asyncio.run(_images_to_upload(url))
    if waiting:
        _say(f"their files are not part of a backup; upload again: {', '.join(waiting)}")


async def _images_to_upload(url: str) -> list[str]:
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch("SELECT name FROM public.image WHERE state = 'uploading' ORDER BY name")
        return [str(row["name"]) for row in rows]
    finally:
        await connection.close()


@contextlib.contextmanager
def _server(deployment: Deployment, *, is_for_load: bool) -> Iterator[str]:
    """The database's URL; an embedded server that does not run is started for as long as this takes."""
    postgres = deployment.postgres
    if postgres is None:
        yield deployment.settings.database.url
        return
    if postgres.pid() is not None and not is_for_load:
        yield postgres.url()
        return
    if not is_for_load and not postgres.data_directory.exists():
        raise database.DatabaseRefused(f"there is nothing to back up in {deployment.state.path}: give another by --state")
    with contextlib.ExitStack() as stack:
        if not is_for_load:
            stack.enter_context(deployment.state.lock())
        postgres.prepare()
        stack.callback(postgres.stop)
        postgres.start()
        asyncio.run(deployment.make_database())
        yield postgres.url()


def _programs(deployment: Deployment, state: database.State) -> database.Programs:
    return database.Programs.find(deployment.postgres.bin_directory if deployment.postgres else None, state.server_major)


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name when it is whole and on the disk, 0600."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.link(partial, path)
    finally:
        partial.unlink()


def _free(path: Path) -> None:
    if path.exists():
        raise TargetRefused(f"{path} is there already: give another name")


def _operator_token(state: StateDirectory) -> str:
    try:
        return state.token_file.read_text().strip()
    except OSError:
        return ""


def _names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()] if directory.is_dir() else []


def _product() -> str:
    try:
        return version("bedplate")
    except PackageNotFoundError:  # a checkout that is not installed
        project = Path(next(iter(controlplane.__path__))).parent / "pyproject.toml"
        return str(tomllib.loads(project.read_text())["project"]["version"])


def _passphrase(source: Path | None) -> str:
    """The first line of the file, or of standard input for `-`."""
    if source is None:
        return ""
    text = sys.stdin.readline() if str(source) == "-" else source.read_text(encoding="utf-8").partition("\n")[0]
    if not (passphrase := text.strip("\r\n")):
        raise BackupUnusable(f"the passphrase in {source} is empty")
    return passphrase


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _create(deployment: Deployment, chosen: argparse.Namespace) -> None:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    archive: Path = chosen.output or Path.cwd()
    if archive.is_dir():
        archive /= f"bedplate-{stamp}.backup"
    keys_file: Path | None = None if chosen.no_keys else chosen.keys or archive.with_name(f"{archive.name}.keys")
    header = create(deployment, archive, keys_file, _passphrase(chosen.passphrase_file))
    if keys_file is not None:
        is_open = chosen.passphrase_file is None
        _say(f"keys: {keys_file} (keep them apart{'; they are not under a passphrase' if is_open else ''})")
    print(json.dumps({**asdict(header), "path": str(archive), "keys": keys_file and str(keys_file)}))


def _restore(deployment: Deployment, chosen: argparse.Namespace) -> None:
    beside = chosen.archive.with_name(f"{chosen.archive.name}.keys")
    keys_file: Path | None = chosen.keys or (beside if beside.exists() else None)
    header = restore(deployment, chosen.archive, keys_file, _passphrase(chosen.passphrase_file), is_dry=chosen.dry_run)
    print(json.dumps({**asdict(header), "path": str(chosen.archive), "state": str(deployment.state.path)}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bedplate backup")
    verbs = parser.add_subparsers(dest="verb", required=True)
    creating, restoring = verbs.add_parser("create"), verbs.add_parser("restore")
    creating.add_argument("--output", type=Path)
    creating.add_argument("--no-keys", action="store_true")
    restoring.add_argument("archive", type=Path)
    restoring.add_argument("--dry-run", action="store_true")
    for verb in (creating, restoring):
        verb.add_argument("--keys", type=Path)
        verb.add_argument("--passphrase-file", type=Path)
        verb.add_argument("--state", type=Path)
    return parser


def main(arguments: list[str] | None = None) -> int:
    chosen = _parser().parse_args(arguments)
    if chosen.state is not None:
        os.environ["BEDPLATE_STATE_DIR"] = str(chosen.state.absolute())
    try:
        settings = Settings()
        state = StateDirectory(path=settings.state_dir.absolute())
        if chosen.verb == "restore" and not chosen.dry_run:
            state.prepare()
        deployment = Deployment(settings=settings, state=state)
        (_create if chosen.verb == "create" else _restore)(deployment, chosen)
    except ValidationError as error:
        _say(f"the configuration is not valid: {error}")
        return 2
    except (TargetRefused, FileExistsError) as error:
        _say(str(error))
        return EXISTS
    except (BackupUnusable, database.DatabaseRefused, migrate.MigrationRefused) as error:
        _say(str(error))
        return 1
    except (StateUnusable, KeyFileUnusable, PostgresFailed, OSError) as error:
        _say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
