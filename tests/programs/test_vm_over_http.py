"""The whole way in one process: HTTP request, kernel, the real agent with fake drivers, the operation's end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from controlplane.api.app import create_app
from controlplane.authz.service import Role
from controlplane.identity.service import new_token
from hostagent.protocol.errors import AgentError
from tests.programs.fleet import KEY, Fleet, open_fleet

VMS = "/v1/projects/ours/vms"
BODY = {"name": "web", "image": "debian", "network": "net", "ssh_keys": [KEY]}


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with open_fleet(database_url, tmp_path) as fleet:
        await fleet.add_host("a")
        yield fleet


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[httpx2.AsyncClient]:
    token = new_token(name="operator", role=Role.OPERATOR)
    async with fleet.database.session() as session:
        session.add(token.row)
    app = create_app(fleet.world.settings, fleet.database, sealer=fleet.world.sealer)
    headers = {"authorization": f"Bearer {token.secret}"}
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=app), base_url="http://api.test", headers=headers
    ) as client:
        yield client


async def ended(client: httpx2.AsyncClient, answer: httpx2.Response) -> str:
    """The state in which the operation of a change ends."""
    assert answer.is_success, answer.text
    shown = await client.get(f"/v1/operations/{answer.headers['x-operation-id']}", params={"wait": "20s"})
    return shown.json()["state"]


async def test_a_vm_from_request_to_running_to_nothing(fleet: Fleet, client: httpx2.AsyncClient) -> None:
    async with fleet.running():
        assert await ended(client, await client.post(VMS, json=BODY)) == "succeeded"
        shown = (await client.get(f"{VMS}/web")).json()
        assert (shown["status"], shown["observed"]["power"], shown["observed"]["driver"]) == ("running", "running", "fake")
        ready = {item["type"]: item["status"] for item in shown["conditions"]}
        assert ready == {"Placed": "true", "HostReachable": "true", "Ready": "true"}
        assert shown["progress"] is None
        for action, status in (("stop", "stopped"), ("start", "running"), ("restart", "running")):
            assert await ended(client, await client.post(f"{VMS}/web/{action}")) == "succeeded"
            assert (await client.get(f"{VMS}/web")).json()["status"] == status
        assert await ended(client, await client.patch(f"{VMS}/web", json={"labels": {"a": "b"}})) == "succeeded"
        assert await ended(client, await client.delete(f"{VMS}/web")) == "succeeded"
        assert (await client.get(f"{VMS}/web")).status_code == 404
        assert (await client.delete(f"{VMS}/web")).status_code == 204
    assert await fleet.on_hosts() == []


async def test_what_the_host_refuses_for_good_fails_with_its_code(fleet: Fleet, client: httpx2.AsyncClient) -> None:
    fake = next(iter(fleet.hosts.values()))
    fake.faults.fail("machine.apply", AgentError("vm.unsupported", "this host boots no such thing", retryable=False))
    async with fleet.running():
        made = await client.post(VMS, json=BODY)
        assert await ended(client, made) == "failed"
        shown = (await client.get(f"{VMS}/web")).json()
        ready = next(item for item in shown["conditions"] if item["type"] == "Ready")
        assert (shown["status"], ready["reason"]) == ("failed", "vm.unsupported")
        assert "boots no such thing" in ready["message"]
        incidents = (await client.get("/v1/incidents")).json()["items"]
        assert [item["code"] for item in incidents] == ["vm.unsupported"]
        assert await ended(client, await client.delete(f"{VMS}/web")) == "succeeded"
    assert await fleet.on_hosts() == []


async def test_a_later_change_supersedes(fleet: Fleet, client: httpx2.AsyncClient) -> None:
    made = await client.post(VMS, json=BODY)
    deleted = await client.delete(f"{VMS}/web")
    async with fleet.running():
        assert await ended(client, deleted) == "succeeded"
        assert await ended(client, made) == "superseded"
    assert await fleet.on_hosts() == []
