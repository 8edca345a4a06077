"""Rotation of the master key: all secrets or none, ended when it was cut, refused while something still runs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import LargeBinary

from controlplane import migrate
from controlplane.backup import __main__ as backup
from controlplane.backup import rotation
from controlplane.backup.rotation import SEALED
from controlplane.core.sealing import SealBroken, Sealer
from controlplane.embedded.services import Deployment
from controlplane.embedded.state import StateDirectory
from controlplane.keyfile import load_sealer
from controlplane.models.all import metadata
from controlplane.models.user import User
from controlplane.resources.host import keys as host_keys
from controlplane.resources.project import keys as project_keys
from controlplane.resources.user import service as users
from controlplane.resources.vm import service as vms
from controlplane.settings import DatabaseSettings, Settings

DIGESTS = {("idempotency_key", "request_sha256"), ("session", "secret_sha256"), ("token", "secret_sha256")} | {
    ("user", "link_sha256"),
    ("key", "secret_sha256"),
    ("login", "secret_sha256"),
}


@pytest.fixture
async def deployment(empty_database_url: str, tmp_path: Path) -> Deployment:
    """Four secrets, of different tables."""
    settings = Settings(state_dir=tmp_path, database=DatabaseSettings(url=empty_database_url))
    made = Deployment(settings=settings, state=StateDirectory(path=tmp_path))
    await migrate.upgrade(empty_database_url)
    sealer = load_sealer(settings)
    connection = await asyncpg.connect(empty_database_url)
    check = sealer.seal(b"bedplate", context="deployment.key_check")
    await connection.execute("INSERT INTO deployment (id, epoch, key_check) VALUES (1, 3, $1)", check)
    await connection.execute("INSERT INTO project (id, name) VALUES ('proj_1', 'one')")
    kek = sealer.seal(b"private half", context=project_keys.seal_context("kek_1"))
    await connection.execute(
        "INSERT INTO project_key (id, project_id, public_key, private_sealed) VALUES ('kek_1', 'proj_1', 'pem', $1)", kek
    )
    login = sealer.seal(b"ssh key", context=host_keys.host_context("host_1"))
    await connection.execute(
        "INSERT INTO host (id, name, address, ssh_key_sealed, ssh_public_key) VALUES ('host_1', 'one', '192.0.2.1', $1, 'k')",
        login,
    )
    answer = sealer.seal(b"answer", context="idempotency:user_1:once")
    columns = "(actor, key, request_sha256, status, answer)"
    await connection.execute(
        f"INSERT INTO idempotency_key {columns} VALUES ('user_1', 'once', '\\x00', 201, $1)",
        answer,
    )
    await connection.close()
    return made


async def opened(deployment: Deployment) -> bytes:
    connection = await asyncpg.connect(deployment.settings.database.url)
    sealed = await connection.fetchval("SELECT private_sealed FROM project_key")
    await connection.close()
    return load_sealer(deployment.settings).open(sealed, context=project_keys.seal_context("kek_1"))


def master_key(deployment: Deployment) -> bytes:
    return (deployment.settings.state_dir / "master.key").read_bytes()


async def rotate(deployment: Deployment, **options: Any) -> dict[str, int]:
    return await asyncio.to_thread(backup.rotate, deployment, options.get("new_key"), is_dry=options.get("is_dry", False))


def test_every_secret_of_the_schema_is_known() -> None:
    found = {
        (table.name, column.name)
        for table in metadata.tables.values()
        for column in table.columns
        if isinstance(column.type, LargeBinary)
    }
    assert found - DIGESTS == {(item.table, item.column) for item in SEALED}
    contexts = {(item.table, item.column): item.context.format(id="x", actor="a", key="k") for item in SEALED}
    assert contexts["host", "ssh_key_sealed"] == host_keys.host_context("x")
    assert (
        contexts["host", "identity_sealed"] == contexts["host_preflight", "identity_sealed"] == host_keys.identity_context("x")
    )
    assert contexts["bootstrap_key", "private_key_sealed"] == host_keys.BOOTSTRAP_CONTEXT
    assert contexts["project_key", "private_sealed"] == project_keys.seal_context("x")
    assert contexts["vm", "user_data_sealed"] == vms.seal_context("x")
    assert contexts["user", "totp_sealed"] == users._context(User(id="x"))


async def test_all_is_sealed_anew_and_the_old_key_opens_nothing(deployment: Deployment) -> None:
    before = master_key(deployment)
    assert sum((await rotate(deployment, is_dry=True)).values()) == 4
    assert master_key(deployment) == before
    assert await opened(deployment) == b"private half"
    assert sum((await rotate(deployment)).values()) == 4
    after = master_key(deployment)
    assert after != before
    assert (deployment.settings.state_dir / "master.key").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in deployment.settings.state_dir.glob("master*")) == ["master.key"]
    assert await opened(deployment) == b"private half"
    assert not await rotation.is_sealed_with(deployment.settings.database.url, Sealer(before))


async def test_one_that_was_cut_is_ended_and_one_that_fails_changes_nothing(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = master_key(deployment)

    def cut(*_: object) -> None:
        raise OSError("power cut")

    with monkeypatch.context() as patched:
        patched.setattr(backup, "write_whole", cut)
        with pytest.raises(OSError, match="power cut"):
            await rotate(deployment)
    assert master_key(deployment) == before, "sealed anew, but the key is not in its place yet"
    assert await rotate(deployment) == {}
    assert master_key(deployment) != before
    assert await opened(deployment) == b"private half"

    connection = await asyncpg.connect(deployment.settings.database.url)
    with pytest.raises(backup.TargetRefused, match="1 other connections"):
        await rotate(deployment)
    await connection.execute("UPDATE host SET ssh_key_sealed = '\\x01aa'")
    await connection.close()
    key = master_key(deployment)
    with pytest.raises(SealBroken):
        await rotate(deployment)
    assert master_key(deployment) == key
    assert await opened(deployment) == b"private half"


async def test_a_key_that_is_kept_elsewhere_is_given(deployment: Deployment, tmp_path: Path) -> None:
    mine, coming = tmp_path / "mine", tmp_path / "coming"
    mine.write_bytes(master_key(deployment))
    coming.write_bytes(os.urandom(32))
    for path in (mine, coming):
        path.chmod(0o600)
    elsewhere = Deployment(
        settings=deployment.settings.model_copy(update={"master_key_file": mine}), state=StateDirectory(path=tmp_path)
    )
    with pytest.raises(backup.KeyFileUnusable, match="kept elsewhere"):
        await rotate(elsewhere)
    assert sum((await rotate(elsewhere, new_key=coming)).values()) == 4
    assert mine.read_bytes() != coming.read_bytes(), "the operator's to put in place"
    assert await rotation.is_sealed_with(deployment.settings.database.url, Sealer(coming.read_bytes()))
