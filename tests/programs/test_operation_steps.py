"""What an operation shows of its run: every step with its times and tries, and when it really ended, unasked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import select

from controlplane.kernel.operation import Past
from controlplane.models.operation import Operation
from hostagent.protocol.errors import AgentError
from tests.programs.fleet import Fleet, open_fleet
from tests.programs.test_vm_over_http import BODY, VMS, client

__all__ = ["client"]


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with open_fleet(database_url, tmp_path) as fleet:
        await fleet.add_host("a")
        yield fleet


async def written(fleet: Fleet, answer: httpx2.Response) -> Operation:
    """The operation's row once it has an end; nobody asks the API."""
    assert answer.is_success, answer.text
    query = select(Operation).where(Operation.id == answer.headers["x-operation-id"])

    async def row() -> Operation:
        async with fleet.database.session() as session:
            return (await session.scalars(query)).one()

    async def is_over() -> bool:
        return (await row()).finished_at is not None

    await fleet.until(is_over, "an end")
    return await row()


async def shown(client: httpx2.AsyncClient, answer: httpx2.Response) -> dict[str, Any]:
    return (await client.get(f"/v1/operations/{answer.headers['x-operation-id']}")).json()


def check_times(operation: dict[str, Any]) -> None:
    """Steps follow each other, within the operation."""
    moments = [datetime.fromisoformat(step[name]) for step in operation["steps"] for name in ("started_at", "finished_at")]
    assert moments == sorted(moments)
    ends = (datetime.fromisoformat(operation["created_at"]), datetime.fromisoformat(operation["finished_at"]))
    assert (moments[0] - ends[0]).total_seconds() > -0.002
    assert abs((ends[1] - moments[-1]).total_seconds()) < 0.5


async def test_each_operation_shows_its_own_steps_and_ends_by_itself(fleet: Fleet, client: httpx2.AsyncClient) -> None:
    async with fleet.running():
        made = await client.post(VMS, json=BODY)
        row = await written(fleet, made)
        vm = await fleet.vm(row.subject_id)
        assert vm is not None
        assert row.finished_at is not None
        assert vm.observed_at is not None
        assert abs((row.finished_at - vm.observed_at).total_seconds()) < 1
        create = await shown(client, made)
        names = [step["name"] for step in create["steps"]]
        assert names[0] == "place"
        assert names[-1] == "apply"
        assert {step["state"] for step in create["steps"]} == {"done"}
        assert {step["attempt"] for step in create["steps"]} == {1}
        check_times(create)

        restarted = await client.post(f"{VMS}/web/restart")
        await written(fleet, restarted)
        assert [step["name"] for step in (await shown(client, restarted))["steps"]] == ["apply"]
        deleted = await client.delete(f"{VMS}/web")
        await written(fleet, deleted)
        gone = await shown(client, deleted)
        assert (gone["state"], [step["name"] for step in gone["steps"]]) == ("succeeded", ["destroy"])
        check_times(gone)
    assert await shown(client, made) == create, "what is over does not change"


async def test_tries_and_their_code_are_kept(fleet: Fleet, client: httpx2.AsyncClient) -> None:
    fake = next(iter(fleet.hosts.values()))
    fake.faults.fail("machine.apply", AgentError("host.disk_full", "no space left", retryable=True))
    async with fleet.running():
        made = await client.post(VMS, json=BODY)
        await written(fleet, made)
    apply = next(step for step in (await shown(client, made))["steps"] if step["name"] == "apply")
    assert (apply["state"], apply["attempt"], apply["error_code"]) == ("done", 2, "host.disk_full")


async def test_a_parked_run_ends_it_at_once_with_its_code(fleet: Fleet, client: httpx2.AsyncClient) -> None:
    fake = next(iter(fleet.hosts.values()))
    fake.faults.fail("machine.apply", AgentError("vm.unsupported", "this host boots no such thing", retryable=False))
    async with fleet.running():
        made = await client.post(VMS, json=BODY)
        row = await written(fleet, made)
        assert (row.state, row.error_code) == ("failed", "vm.unsupported")
        last = (await shown(client, made))["steps"][-1]
        assert (last["name"], last["state"], last["error_code"]) == ("apply", "failed", "vm.unsupported")
        assert "boots no such thing" in last["error"]
        assert row.finished_at is not None
        assert abs((row.finished_at - datetime.fromisoformat(last["finished_at"])).total_seconds()) < 0.5
        deleted = await client.delete(f"{VMS}/web")
        await written(fleet, deleted)
        assert [step["name"] for step in (await shown(client, deleted))["steps"]] == ["destroy"]


async def test_a_delete_cuts_off_what_was_under_way(fleet: Fleet, client: httpx2.AsyncClient) -> None:
    fake = next(iter(fleet.hosts.values()))
    fake.faults.fail("machine.apply", AgentError("host.busy", "later", retryable=True), times=1000)
    async with fleet.running():
        made = await client.post(VMS, json=BODY)

        async def is_at_apply() -> bool:
            steps = (await shown(client, made))["steps"]
            return bool(steps) and steps[-1]["name"] == "apply" and steps[-1]["attempt"] > 1

        await fleet.until(is_at_apply, "a second try of apply")
        deleted = await client.delete(f"{VMS}/web")
        await written(fleet, deleted)
        assert (await written(fleet, made)).state == "superseded"
        run = await fleet.run_of("vm", (await shown(client, made))["subject_id"])
        past = [Past.of(entry) for entry in run.history]
        assert [(step.name, step.state) for step in past[-2:]] == [("apply", "cut"), ("destroy", "done")]


async def test_history_is_bounded(fleet: Fleet, client: httpx2.AsyncClient) -> None:
    async with fleet.running():
        made = await client.post(VMS, json=BODY)
        await written(fleet, made)
        for _ in range(17):  # each change adds two steps
            await written(fleet, await client.post(f"{VMS}/web/restart"))
        row = await fleet.run_of("vm", (await shown(client, made))["subject_id"])
    assert len(row.history) == 32
    assert (await shown(client, made))["steps"][0]["name"] == "place", "an operation keeps its own"
