"""Operations: their end follows from generations and runs."""

from __future__ import annotations

import asyncio
import threading
import time

import asyncpg
import pytest
from sqlalchemy import event, text

from controlplane import kernel
from controlplane.authz.service import SYSTEM
from controlplane.core.ids import Kind, new_id
from controlplane.kernel.operation import settle
from controlplane.models.operation import Operation
from controlplane.models.project import Project
from controlplane.resources.operation import service

SUBJECT = "project"  # any table with generations will do


@pytest.fixture
async def project_id(database):
    async with database.sessionmaker.begin() as session:
        row = Project(id=new_id(Kind.PROJECT), name="subject")
        session.add(row)
    return row.id


@pytest.fixture
def change(database, project_id):
    """Record an operation as a service does; returns its id."""

    async def record(action: str, generation: int) -> str:
        async with database.sessionmaker.begin() as session:
            await session.execute(
                text("UPDATE project SET generation = :g WHERE id = :id"), {"g": generation, "id": project_id}
            )
            operation = await service.record(session, SUBJECT, project_id, generation, action, SYSTEM)
        return operation.id

    return record


@pytest.fixture
def execute(database, project_id):
    async def run(statement: str, **values) -> None:
        async with database.sessionmaker.begin() as session:
            await session.execute(text(statement), {"id": project_id, **values})

    return run


async def state_of(client, operation_id: str) -> str:
    return (await client.get(f"/v1/operations/{operation_id}")).json()["state"]


OBSERVE = "UPDATE project SET observed_generation = :g WHERE id = :id"


async def test_succeeds_when_the_generation_is_observed(operator, change, execute):
    operation = await change("project.create", 1)
    assert await state_of(operator, operation) == "running"
    await execute(OBSERVE, g=1)
    shown = (await operator.get(f"/v1/operations/{operation}")).json()
    assert shown["state"] == "succeeded"
    assert shown["finished_at"]
    assert shown["error_code"] is None


async def test_a_later_change_supersedes_only_what_was_not_reached(operator, change, execute):
    reached = await change("project.create", 1)
    await execute(OBSERVE, g=1)
    skipped = await change("project.update", 2)
    last = await change("project.update", 3)
    await execute(OBSERVE, g=3)
    assert [await state_of(operator, item) for item in (reached, skipped, last)] == ["succeeded", "superseded", "succeeded"]


async def test_a_delete_supersedes_at_once_and_succeeds_when_all_is_gone(operator, change, execute):
    made = await change("project.create", 1)
    deleted = await change("project.delete", 2)
    assert await state_of(operator, made) == "superseded"
    await execute(OBSERVE, g=2)
    assert await state_of(operator, deleted) == "running"
    await execute("DELETE FROM project WHERE id = :id")
    assert await state_of(operator, deleted) == "succeeded"


async def test_fails_with_the_code_of_the_parked_run_and_shows_its_step(operator, change, execute, database, project_id):
    async with database.sessionmaker.begin() as session:
        await kernel.start(session, SUBJECT, project_id)
    operation = await change("project.create", 1)
    await execute("UPDATE run SET step = 'prepare', failures = 1, last_error = 'no answer' WHERE subject = :id")
    shown = (await operator.get(f"/v1/operations/{operation}")).json()
    step = shown["steps"][0]
    assert (step["name"], step["state"], step["attempt"], step["error"]) == ("prepare", "running", 2, "no answer")

    park = (
        "UPDATE run SET parked_at = now(), parked_code = 'image.bad', parked_detail = 'why', wake_at = NULL WHERE subject = :id"
    )
    await execute(park)
    shown = (await operator.get(f"/v1/operations/{operation}")).json()
    assert (shown["state"], shown["error_code"], shown["error_detail"]) == ("failed", "image.bad", "why")

    deleted = await change("project.delete", 2)
    assert await state_of(operator, deleted) == "running"


async def claim(url: str, subject: str) -> None:
    """A worker takes the run over, as the kernel's statement does."""
    at_work = "parked_at = NULL, parked_code = NULL, parked_detail = NULL, wake_at = now()"
    connection = await asyncpg.connect(url)
    async with connection.transaction():
        run_id = await connection.fetchval(f"UPDATE run SET {at_work} WHERE subject = $1 RETURNING id", subject)
        await connection.execute("UPDATE signal SET seen_at = now() WHERE run_id = $1", run_id)
    await connection.close()


async def test_a_claim_between_two_looks_does_not_bring_an_old_failure_back(
    change, execute, database, database_url, project_id
):
    """Tried again after it parked: whoever looks just when a worker takes the run over sees it at work."""
    async with database.sessionmaker.begin() as session:
        await kernel.start(session, SUBJECT, project_id)
    await execute(
        "UPDATE run SET parked_at = now(), parked_code = 'image.bad', parked_detail = 'why', wake_at = NULL WHERE subject = :id"
    )
    async with database.sessionmaker.begin() as session:
        await kernel.resume(session, SUBJECT, project_id)
    operation = await change("project.update", 1)

    looks: list[str] = []

    def looked(_connection, _cursor, statement: str, *_: object) -> None:
        if "FROM run" in statement:
            if not looks:
                worker = threading.Thread(target=lambda: asyncio.run(claim(database_url, project_id)))
                worker.start()
                worker.join()
            looks.append(statement)

    engine = database.sessionmaker.kw["bind"].sync_engine
    event.listen(engine, "after_cursor_execute", looked)
    try:
        async with database.sessionmaker.begin() as session:
            row = await session.get_one(Operation, operation)
            await settle(session, [row])
    finally:
        event.remove(engine, "after_cursor_execute", looked)
    assert looks
    assert (row.state, row.error_code) == ("running", None)


async def test_wait_answers_as_soon_as_it_ends(operator, change, execute):
    operation = await change("project.create", 1)
    began = time.monotonic()
    waiting = asyncio.create_task(operator.get(f"/v1/operations/{operation}", params={"wait": "20s"}))
    done, _ = await asyncio.wait({waiting}, timeout=0.5)
    assert not done
    await execute(OBSERVE, g=1)
    assert (await waiting).json()["state"] == "succeeded"
    assert time.monotonic() - began < 10


async def test_wait_ends_with_its_time_and_with_a_new_step(operator, change, execute, database, project_id):
    async with database.sessionmaker.begin() as session:
        await kernel.start(session, SUBJECT, project_id)
    operation = await change("project.create", 1)
    answer = await operator.get(f"/v1/operations/{operation}", params={"wait": "200ms"})
    assert answer.json()["state"] == "running"
    waiting = asyncio.create_task(operator.get(f"/v1/operations/{operation}", params={"wait": "20s", "seen": "start"}))
    await execute("UPDATE run SET step = 'prepare' WHERE subject = :id")
    assert (await waiting).json()["steps"][0]["name"] == "prepare"


async def test_waiting_holds_no_connection(operator, change, execute):
    """More waiters than the pool has connections."""
    operation = await change("project.create", 1)
    waiting = [asyncio.create_task(operator.get(f"/v1/operations/{operation}", params={"wait": "20s"})) for _ in range(30)]
    await asyncio.wait(waiting, timeout=0.3)
    await execute(OBSERVE, g=1)
    answers = await asyncio.gather(*waiting)
    assert {answer.json()["state"] for answer in answers} == {"succeeded"}


@pytest.mark.parametrize("wait", ["soon", "61s", "-1s", "1h", "", "2m"])
async def test_bad_waits(operator, change, wait):
    operation = await change("project.create", 1)
    answer = await operator.get(f"/v1/operations/{operation}", params={"wait": wait})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "/wait"


async def test_members_see_their_projects_operations_only(operator, member, stranger, database, project_id):
    async with database.sessionmaker.begin() as session:
        ours = await session.scalar(text("SELECT id FROM project WHERE name = 'ours'"))
        operation = await service.record(session, SUBJECT, project_id, 1, "vm.create", SYSTEM, project_id=ours)
    path = f"/v1/operations/{operation.id}"
    assert (await operator.get(path)).status_code == (await member.get(path)).status_code == 200
    hidden = await stranger.get(path)
    assert (hidden.status_code, hidden.json()["code"]) == (404, "operation.not_found")
    assert len((await member.get("/v1/operations")).json()["items"]) == 1
    assert (await stranger.get("/v1/operations")).json()["items"] == []
    filtered = await operator.get("/v1/operations", params={"filter": ["state=running", "action=vm.create"]})
    assert len(filtered.json()["items"]) == 1
