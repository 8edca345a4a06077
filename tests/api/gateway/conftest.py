"""A gateway over a real database, beside an engine that does what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import asyncpg
import openai
import pytest

from controlplane.core.ids import Kind, new_id
from controlplane.gateway.app import Gateway
from controlplane.gateway.server import listening
from controlplane.settings import GatewaySettings, Settings
from tests.api.gateway.mock_engine import MockEngine

# The first revision of an endpoint, as its own columns are.
REVISION = """
INSERT INTO endpoint_revision (endpoint_id, number, model, spec, vcpus, memory_bytes)
SELECT id, revision, model, spec, vcpus, memory_bytes FROM endpoint WHERE id = $1
"""


@dataclass
class Fleet:
    """Rows that the gateway reads, written as the control plane would; every change is published."""

    database_url: str
    project_id: str = ""
    other_project_id: str = ""
    replicas: list[str] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[asyncpg.Connection]:
        connection = await asyncpg.connect(self.database_url)
        try:
            yield connection
        finally:
            await connection.close()

    async def publish(self, connection: asyncpg.Connection, topic: str) -> None:
        await connection.execute(
            "INSERT INTO gateway_version AS v VALUES ($1, 1) ON CONFLICT (topic) DO UPDATE SET version = v.version + 1",
            topic,
        )
        await connection.execute("SELECT pg_notify('bedplate_gateway', $1)", topic)

    async def project(self) -> str:
        async with self.connection() as connection:
            project_id = new_id(Kind.PROJECT)
            await connection.execute("INSERT INTO project (id, name) VALUES ($1, $2)", project_id, f"p-{secrets.token_hex(4)}")
            return project_id

    async def key(self, *, project_id: str = "", models: list[str] | None = None, **columns: object) -> str:
        secret = f"bpk_{secrets.token_urlsafe(24)}"
        row = {
            "id": new_id(Kind.KEY),
            "project_id": project_id or self.project_id,
            "name": f"k-{secrets.token_hex(4)}",
            "secret_sha256": hashlib.sha256(secret.encode()).digest(),
            "hint": secret[-4:],
            "models": models,
            **columns,
        }
        async with self.connection() as connection:
            await self._insert(connection, "key", row)
            await self.publish(connection, "keys")
        return secret

    async def model(self, name: str, *urls: str, project_id: str = "", timeouts: dict | None = None, **spec: object) -> str:
        """A route with one endpoint and a ready replica for each URL; returns the endpoint's id."""
        project_id = project_id or self.project_id
        endpoint_id, route_id = new_id(Kind.ENDPOINT), new_id(Kind.ROUTE)
        document = {"served_model_id": "served", **spec}
        async with self.connection() as connection, connection.transaction():
            await connection.execute(
                "INSERT INTO endpoint (id, project_id, name, model, spec, replicas, vcpus, memory_bytes)"
                " VALUES ($1, $2, $3, $4, $5, $6, 1, 1 << 30)",
                endpoint_id,
                project_id,
                f"e-{secrets.token_hex(4)}",
                name,
                json.dumps(document),
                max(1, len(urls)),
            )
            await connection.execute(REVISION, endpoint_id)
            await connection.execute(
                "INSERT INTO route (id, project_id, name, timeouts) VALUES ($1, $2, $3, $4)",
                route_id,
                project_id,
                name,
                json.dumps(timeouts or {}),
            )
            await connection.execute("INSERT INTO route_target (route_id, endpoint_id) VALUES ($1, $2)", route_id, endpoint_id)
            for url in urls:
                await self._replica(connection, project_id, endpoint_id, url)
            await self.publish(connection, "routes")
        return endpoint_id

    async def route(self, name: str, **columns: object) -> None:
        """Change columns of a route: `retry`, `affinity`, `rules`."""
        for column, value in columns.items():
            await self.execute(f"UPDATE route SET {column} = $2 WHERE name = $1", name, json.dumps(value), topic="routes")

    async def fall_back(self, endpoint_id: str, fallback_id: str) -> None:
        query = "UPDATE route_target SET fallback_endpoint_id = $2 WHERE endpoint_id = $1"
        await self.execute(query, endpoint_id, fallback_id, topic="routes")

    async def _replica(self, connection: asyncpg.Connection, project_id: str, endpoint_id: str, url: str) -> None:
        replica_id = new_id(Kind.REPLICA)
        self.replicas.append(replica_id)
        await connection.execute(
            "INSERT INTO replica (id, project_id, endpoint_id, state, base_url, ready_at)"
            " VALUES ($1, $2, $3, 'ready', $4, now())",
            replica_id,
            project_id,
            endpoint_id,
            url,
        )

    async def _insert(self, connection: asyncpg.Connection, table: str, row: dict) -> None:
        names = ", ".join(row)
        values = ", ".join(f"${i}" for i in range(1, len(row) + 1))
        await connection.execute(f"INSERT INTO {table} ({names}) VALUES ({values})", *row.values())

    async def usage(self, *, count: int = 1) -> list[asyncpg.Record]:
        """The usage records, once there are `count`, oldest first."""
        async with self.connection() as connection:
            deadline = asyncio.get_running_loop().time() + 10
            while True:
                rows = await connection.fetch("SELECT * FROM usage_record ORDER BY segment, sequence")
                if len(rows) >= count:
                    return rows
                assert asyncio.get_running_loop().time() < deadline, f"{len(rows)} usage records, expected {count}"
                await asyncio.sleep(0.1)

    async def execute(self, query: str, *arguments: object, topic: str) -> None:
        async with self.connection() as connection, connection.transaction():
            await connection.execute(query, *arguments)
            await self.publish(connection, topic)


@dataclass
class RunningGateway:
    url: str
    app: Gateway
    key: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    async def fresh(self) -> None:
        """Return when everything committed until now is known to the gateway."""
        await self.app.keeper.recheck()

    def openai(self, key: str = "", **options: object) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key or self.key, **options)


@pytest.fixture
async def fleet(database_url: str) -> Fleet:
    fleet = Fleet(database_url)
    fleet.project_id = await fleet.project()
    fleet.other_project_id = await fleet.project()
    return fleet


@pytest.fixture
async def engine() -> AsyncIterator[MockEngine]:
    engine = MockEngine()
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
def gateway_settings(tmp_path, monkeypatch, database_url: str) -> Settings:
    monkeypatch.setenv("BEDPLATE_CONFIG", str(tmp_path / "none.toml"))
    return Settings(
        state_dir=tmp_path,
        database={"url": database_url},
        gateway=GatewaySettings(listen="127.0.0.1:0", max_body_bytes=2 << 20),
    )


@pytest.fixture
async def gateway(gateway_settings: Settings, fleet: Fleet, engine: MockEngine) -> AsyncIterator[RunningGateway]:
    """A gateway with the model `chat` on the mock engine and a key that may use everything of the project."""
    key = await fleet.key()
    await fleet.model("chat", engine.url)
    async with listening(gateway_settings) as (app, server, url):
        yield RunningGateway(url=url, app=app, key=key)
        server.should_exit = True


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session
