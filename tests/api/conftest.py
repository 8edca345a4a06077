"""The API in this process over a real database, and clients of every role."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import httpx2
import pytest
from fastapi import FastAPI

from controlplane.api.app import create_app
from controlplane.authz.service import Role
from controlplane.core.ids import Kind, new_id
from controlplane.core.sealing import Sealer
from controlplane.identity.service import new_token
from controlplane.kernel.database import Database
from controlplane.kernel.publish import RecordingPublisher
from controlplane.models.project import Project
from controlplane.settings import Settings


@dataclass(frozen=True)
class Api:
    """One application; `client(token)` speaks to it as that token's holder."""

    app: FastAPI
    database: Database
    operator_token: str
    member_token: str
    stranger_token: str
    viewer_token: str

    def client(self, token: str | None) -> httpx2.AsyncClient:
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        transport = httpx2.ASGITransport(app=self.app)
        return httpx2.AsyncClient(transport=transport, base_url="http://api.test", headers=headers)


async def cut_connections(database: Database) -> None:
    """What a restart of PostgreSQL does to a pool."""
    others = "datname = current_database() AND pid <> pg_backend_pid()"
    async with database.pool.acquire() as connection:
        await connection.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")


@pytest.fixture
def cut(database: Database) -> Callable[[], Awaitable[None]]:
    """Cuts every pooled connection, as a restart of PostgreSQL does."""
    return partial(cut_connections, database)


@pytest.fixture
def settings(tmp_path, monkeypatch) -> Settings:
    monkeypatch.setenv("BEDPLATE_CONFIG", str(tmp_path / "none.toml"))
    return Settings(state_dir=tmp_path)


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = await Database.open(database_url, publisher=RecordingPublisher())
    yield opened
    await opened.close()


@pytest.fixture
async def api(database: Database, settings: Settings) -> Api:
    """The API with two projects and a token of each role: `member` (an editor) and `viewer` of ours, `stranger` of theirs."""
    async with database.sessionmaker.begin() as session:
        tokens = {"operator": new_token(name="operator", role=Role.OPERATOR)}
        projects = {name: Project(id=new_id(Kind.PROJECT), name=name) for name in ("ours", "theirs")}
        session.add_all(projects.values())
        await session.flush()
        for holder, project, role in (
            ("member", "ours", Role.MEMBER),
            ("stranger", "theirs", Role.MEMBER),
            ("viewer", "ours", Role.VIEWER),
        ):
            tokens[holder] = new_token(name=holder, role=role, project_id=projects[project].id)
        session.add_all([token.row for token in tokens.values()])
    app = create_app(settings, database, sealer=Sealer(bytes(32)))
    secrets = {f"{name}_token": token.secret for name, token in tokens.items()}
    return Api(app=app, database=database, **secrets)


@pytest.fixture
async def operator(api: Api) -> AsyncIterator[httpx2.AsyncClient]:
    async with contextlib.aclosing(api.client(api.operator_token)) as client:
        yield client


@pytest.fixture
async def member(api: Api) -> AsyncIterator[httpx2.AsyncClient]:
    async with contextlib.aclosing(api.client(api.member_token)) as client:
        yield client


@pytest.fixture
async def viewer(api: Api) -> AsyncIterator[httpx2.AsyncClient]:
    async with contextlib.aclosing(api.client(api.viewer_token)) as client:
        yield client


@pytest.fixture
async def stranger(api: Api) -> AsyncIterator[httpx2.AsyncClient]:
    async with contextlib.aclosing(api.client(api.stranger_token)) as client:
        yield client


@pytest.fixture
async def anonymous(api: Api) -> AsyncIterator[httpx2.AsyncClient]:
    async with contextlib.aclosing(api.client(None)) as client:
        yield client
