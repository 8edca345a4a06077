"""Backups of the control plane: they restore, raise the epoch, and whatever does not fit is refused before anything changes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from controlplane import migrate
from controlplane.backup import __main__ as backup
from controlplane.backup import database, keys
from controlplane.backup.archive import BackupUnusable, Reader
from controlplane.core.sealing import Sealer
from controlplane.embedded.postgres import Postgres
from controlplane.embedded.services import Deployment, base_environment
from controlplane.embedded.state import StateDirectory
from controlplane.keyfile import load_sealer
from controlplane.settings import Settings

MARKER = "marker-of-a-project"
DIGESTS = {"kept": "a" * 64, "lost": "b" * 64}


def deployment_at(state: Path, url: str) -> Deployment:
    state.mkdir(exist_ok=True)
    return Deployment(settings=Settings(state_dir=state, database={"url": url}), state=StateDirectory(path=state))


async def fill(url: str, sealer: Sealer) -> None:
    """A deployment with a project, a host document and images, one of whose files lies in the store."""
    await migrate.upgrade(url)
    sealed = sealer.seal(b"bedplate", context="deployment.key_check")
    connection = await asyncpg.connect(url)
    await connection.execute("INSERT INTO deployment (id, epoch, key_check) VALUES (1, 3, $1)", sealed)
    await connection.execute("INSERT INTO project (id, name) VALUES ('proj_1', $1)", MARKER)
    await connection.execute("INSERT INTO host (id, name, address) VALUES ('host_1', 'one', '192.0.2.1')")
    await connection.execute("""
        INSERT INTO host_document (host_id, kind, object_id, document, digest, generation, applied_generation, applied_at)
        VALUES ('host_1', 'policy', 'policy', '{}', '', 7, 7, now())""")
    await connection.execute("""
        INSERT INTO run (id, program, subject, shard, step, wake_at, lease, lease_until)
        VALUES ('run_1', 'vm', 'vm_1', 0, 'serve', now() + interval '1 hour', NULL, NULL)""")
    for name, sha256 in DIGESTS.items():
        await connection.execute(
            """
            INSERT INTO image
            (id, name, architecture, default_user, boot, root_file, min_disk_bytes, min_memory_bytes, state, available_at)
            VALUES ($1, $1, 'x86_64', 'u', '{"kind": "firmware"}', 'disk', 1, 1, 'available', now())
            """,
            name,
        )
        await connection.execute("INSERT INTO blob (sha256, size_bytes, stored_at) VALUES ($1, 1, now())", sha256)
        await connection.execute(
            "INSERT INTO image_file (image_id, name, sha256, size_bytes) VALUES ($1, 'disk', $2, 1)", name, sha256
        )
    await connection.close()


async def fetch(url: str, query: str) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


@pytest.fixture
async def source(empty_database_url: str, tmp_path: Path) -> Deployment:
    deployment = deployment_at(tmp_path / "source", empty_database_url)
    await fill(empty_database_url, load_sealer(deployment.settings))
    (tmp_path / "source/operator-token").write_text("operator-secret\n")
    return deployment


@pytest.fixture
async def made(source: Deployment, tmp_path: Path) -> tuple[Path, Path]:
    archive, keys_file = tmp_path / "one.backup", tmp_path / "keys/one.keys"
    await asyncio.to_thread(backup.create, source, archive, keys_file, "open sesame")
    return archive, keys_file


@pytest.fixture
async def target_url(postgres: Postgres) -> Any:
    name = f"restored_{os.getpid()}"
    admin = await asyncpg.connect(postgres.url("postgres"))
    await admin.execute(f"CREATE DATABASE {name}")
    yield postgres.url(name)
    await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    await admin.close()


async def restore(state: Path, url: str, archive: Path, keys_file: Path | None, passphrase: str = "open sesame") -> None:
    await asyncio.to_thread(backup.restore, deployment_at(state, url), archive, keys_file, passphrase, is_dry=False)


async def test_it_restores_everything_under_a_later_epoch(made, source, target_url, tmp_path) -> None:
    archive, keys_file = made
    assert archive.stat().st_mode & 0o777 == keys_file.stat().st_mode & 0o777 == 0o600
    master_key = (source.settings.state_dir / "master.key").read_bytes()
    for secret in (MARKER.encode(), b"operator-secret", master_key):
        assert secret not in archive.read_bytes()
        assert secret not in keys_file.read_bytes()
    state = tmp_path / "fresh"
    (state / "images").mkdir(parents=True)
    (state / "images" / DIGESTS["kept"]).touch()
    await restore(state, target_url, archive, keys_file)
    assert (state / "master.key").read_bytes() == master_key
    assert (state / "master.key").stat().st_mode & 0o777 == 0o600
    assert (state / "operator-token").read_text() == "operator-secret\n"
    assert await fetch(target_url, "SELECT name FROM project") == MARKER
    first = await fetch(target_url, "SELECT epoch FROM deployment")
    assert first > 3
    assert await fetch(target_url, "SELECT applied_generation FROM host_document") == 0, "hosts are told again"
    assert await fetch(target_url, "SELECT wake_at <= now() FROM run")
    assert await fetch(target_url, "SELECT string_agg(name || ' ' || state, ', ' ORDER BY name) FROM image") == (
        "kept available, lost uploading"
    )
    assert await migrate.differences(target_url) == []


async def test_what_does_not_fit_is_refused_and_nothing_changes(made, target_url, tmp_path) -> None:
    archive, keys_file = made
    state = tmp_path / "fresh"
    other = tmp_path / "other.keys"
    keys.save(other, keys.Keys(master_key=os.urandom(32)))
    cases = [
        (archive, keys_file, "wrong", "the passphrase is not the one"),
        (archive, keys_file, "", "--passphrase-file"),
        (archive, other, "", "another master key"),
        (archive, archive, "", "not a keys file"),
        (archive, tmp_path / "none", "", "No such file"),
        (keys_file, keys_file, "open sesame", "not a backup of Bedplate"),
        (tmp_path / "none", keys_file, "open sesame", "No such file"),
    ]
    for file, key, passphrase, words in cases:
        with pytest.raises(BackupUnusable, match=words):
            await restore(state, target_url, file, key, passphrase)
    assert list(state.iterdir()) == []
    assert await asyncio.to_thread(database.state_of, target_url) == database.State(revision="", epoch=0, server_major=18)


async def test_a_damaged_file_is_refused(made, target_url, tmp_path) -> None:
    archive, keys_file = made
    whole = archive.read_bytes()
    damaged = tmp_path / "damaged.backup"
    start = len(whole) - len(whole.split(b"\n", 2)[2])
    cuts = [whole[:5], whole[: start - 1], whole[:start], whole[: start + 2], whole[: start + 100], whole[:-1], whole + b"x"]
    flips = [
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in (30, start - 8, start + 3, start + 50, len(whole) - 1)
    ]
    for content in [*cuts, *flips]:
        damaged.write_bytes(content)
        with pytest.raises(BackupUnusable):
            await restore(tmp_path / "fresh", target_url, damaged, keys_file)
    assert (await asyncio.to_thread(database.state_of, target_url)).revision == ""


async def test_one_of_a_newer_version_is_refused(made, source, target_url, tmp_path) -> None:
    archive, keys_file = made
    head, line, rest = archive.read_bytes().split(b"\n", 2)
    newer = tmp_path / "newer.backup"
    newer.write_bytes(b"\n".join([head, line.replace(b'"format": 1', b'"format": 2'), rest]))
    with pytest.raises(BackupUnusable, match="use a newer one"):
        Reader(newer)
    await asyncio.to_thread(_set_revision, source.settings.database.url)
    await asyncio.to_thread(backup.create, source, tmp_path / "future.backup", None, "")
    with pytest.raises(BackupUnusable, match="a newer version made it"):
        await restore(tmp_path / "fresh", target_url, tmp_path / "future.backup", keys_file)


def _set_revision(url: str) -> None:
    asyncio.run(fetch(url, "UPDATE alembic_version SET version_num = '29990101_0000' RETURNING 1"))


async def test_a_target_that_holds_something_is_left_alone(made, source, target_url, tmp_path) -> None:
    archive, keys_file = made
    with pytest.raises(backup.TargetRefused, match="not empty"):
        await restore(tmp_path / "fresh", source.settings.database.url, archive, keys_file)
    assert await fetch(source.settings.database.url, "SELECT epoch FROM deployment") == 3
    load_sealer(Settings(state_dir=tmp_path / "fresh"))
    with pytest.raises(backup.TargetRefused, match="another master key"):
        await restore(tmp_path / "fresh", target_url, archive, keys_file)
    with pytest.raises(backup.TargetRefused, match="is there already"):
        await asyncio.to_thread(backup.create, source, archive, None, "")
    await fetch(target_url, "CREATE TABLE theirs ()")
    with pytest.raises(database.DatabaseRefused, match="not Bedplate's"):
        await restore(tmp_path / "empty", target_url, archive, keys_file)


async def test_a_load_that_is_cut_leaves_the_database_empty(made, target_url) -> None:
    archive, keys_file = made
    sealer = keys.load(keys_file, "open sesame").sealer
    state = await asyncio.to_thread(database.state_of, target_url)
    programs = database.Programs.find(None, state.server_major)

    def half() -> Any:
        yield from (chunk[: len(chunk) // 2] for chunk in Reader(archive).chunks(sealer))
        raise BackupUnusable("cut")

    with pytest.raises(BackupUnusable, match="cut"):
        await asyncio.to_thread(database.load, programs, target_url, half(), "SELECT 1;")
    with pytest.raises(database.DatabaseRefused, match="psql"):
        await asyncio.to_thread(database.load, programs, target_url, Reader(archive).chunks(sealer), "SELECT nonsense;")
    assert (await asyncio.to_thread(database.state_of, target_url)).revision == ""


@pytest.fixture
def passable() -> Iterator[Path]:
    """A directory that the account of the embedded server may pass."""
    with tempfile.TemporaryDirectory(prefix="bedplate-test-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


async def test_a_fresh_state_directory_by_the_command(made, passable) -> None:
    """With the embedded server, which the command starts for itself and stops."""
    archive, keys_file = made
    state = passable / "state"
    secret = keys_file.with_name("passphrase")
    secret.write_text("open sesame\n")
    command = [sys.executable, "-m", "controlplane.cli.main", "backup"]
    more = ["--passphrase-file", str(secret), "--state", str(state), "-o", "json"]
    environment = base_environment()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, env=environment, timeout=60)

    looked = await asyncio.to_thread(run, "restore", str(archive), "--keys", str(keys_file), *more, "--dry-run")
    assert looked.returncode == 0, looked.stderr
    assert not state.exists()
    done = await asyncio.to_thread(run, "restore", str(archive), "--keys", str(keys_file), *more)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["epoch"] == 3
    assert re.search(r"epoch 3 became \d{10}", done.stderr)
    again = await asyncio.to_thread(run, "restore", str(archive), "--keys", str(keys_file), *more)
    assert (again.returncode, "not empty" in again.stderr) == (5, True)
    second = state.parent / "second.backup"
    kept = await asyncio.to_thread(run, "create", "--output-file", str(second), "--no-keys", *more)
    assert kept.returncode == 0, kept.stderr
    assert Reader(second).verify(load_sealer(Settings(state_dir=state))) > 0
    assert Postgres(directory=state / "postgres").pid() is None
