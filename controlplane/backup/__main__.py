"""`python -m controlplane.backup create | restore | rotate`: what `bedplate backup` and `bedplate master-key` run, on the
control plane's machine.

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
from controlplane.backup import database, keys, rotation
from controlplane.backup.archive import BackupUnusable, Header, Reader, Writer, key_id
from controlplane.core.files import write_whole
from controlplane.core.sealing import SealBroken, Sealer
from controlplane.embedded.postgres import PostgresFailed
from controlplane.embedded.services import Deployment
from controlplane.embedded.state import StateDirectory, StateUnusable
from controlplane.keyfile import KeyFileUnusable, is_own, make_key, master_key_path, read_key, read_master_key
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


def rotate(deployment: Deployment, new_key: Path | None, *, is_dry: bool) -> dict[str, int]:
    """Seal everything anew under a new master key, and put that in its place; one that was cut is ended. Nothing else may run
    meanwhile. Raises KeyFileUnusable, TargetRefused, SealBroken, and what the parts raise; then the old key holds on.
    """
    settings, place = deployment.settings, master_key_path(deployment.settings)
    if new_key is None and not is_own(settings):
        raise KeyFileUnusable("the master key is kept elsewhere: make the new one there too, and give it by --new-key")
    if deployment.postgres is not None and not deployment.postgres.data_directory.exists():
        raise database.DatabaseRefused(f"there is nothing in {deployment.state.path}: give another by --state")
    coming = new_key or place.with_name(f"{place.name}.next")
    with deployment.state.lock(), _server(deployment, is_for_load=True) as url:
        asyncio.run(_check_alone(url))
        if new_key is None:
            make_key(coming)
        try:
            counts = asyncio.run(_seal_anew(url, Sealer(read_master_key(settings)), Sealer(read_key(coming)), is_dry=is_dry))
        finally:
            if is_dry and new_key is None:
                coming.unlink()
        if is_own(settings) and not is_dry:
            write_whole(place, read_key(coming))
            if new_key is None:
                coming.unlink()
    return counts


async def _seal_anew(url: str, old: Sealer, new: Sealer, *, is_dry: bool) -> dict[str, int]:
    if await rotation.is_sealed_with(url, new):
        return {}
    if not await rotation.is_sealed_with(url, old):
        raise KeyFileUnusable("the master key is not the one that this database's secrets are sealed with")
    return await rotation.seal_anew(url, old, new, is_dry=is_dry)


async def _check_alone(url: str) -> None:
    """What runs with the old key would go on sealing under it."""
    connection = await asyncpg.connect(url)
    query = """SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"""
    try:
        others = await connection.fetchval(query)
    finally:
        await connection.close()
    if others:
        raise TargetRefused(f"the database has {others} other connections: stop all processes of the control plane first")


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


def _rotate(deployment: Deployment, chosen: argparse.Namespace) -> None:
    counts = rotate(deployment, chosen.new_key, is_dry=chosen.dry_run)
    if not counts:
        _say("everything is sealed under the new key already: it is in its place now")
    elif not chosen.dry_run and not is_own(deployment.settings):
        _say(f"everything is sealed under the key in {chosen.new_key}: put it in the old one's place before you start")
    if not chosen.dry_run:
        _say("write a keys file for backups from now on: `bedplate backup create`; older backups need their own")
    print(json.dumps({"sealed": sum(counts.values()), "state": str(deployment.state.path), "dry_run": chosen.dry_run}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bedplate backup")
    verbs = parser.add_subparsers(dest="verb", required=True)
    creating, restoring = verbs.add_parser("create"), verbs.add_parser("restore")
    creating.add_argument("--output", type=Path)
    creating.add_argument("--no-keys", action="store_true")
    restoring.add_argument("archive", type=Path)
    restoring.add_argument("--dry-run", action="store_true")
    rotating = verbs.add_parser("rotate")
    rotating.add_argument("--new-key", type=Path)
    rotating.add_argument("--dry-run", action="store_true")
    for verb in (creating, restoring):
        verb.add_argument("--keys", type=Path)
        verb.add_argument("--passphrase-file", type=Path)
    for verb in (creating, restoring, rotating):
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
        {"create": _create, "restore": _restore, "rotate": _rotate}[chosen.verb](deployment, chosen)
    except ValidationError as error:
        _say(f"the configuration is not valid: {error}")
        return 2
    except (TargetRefused, FileExistsError) as error:
        _say(str(error))
        return EXISTS
    except (BackupUnusable, SealBroken, database.DatabaseRefused, migrate.MigrationRefused) as error:
        _say(str(error))
        return 1
    except (StateUnusable, KeyFileUnusable, PostgresFailed, OSError) as error:
        _say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
