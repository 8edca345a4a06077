"""Incidents: seen, filtered and resolved by operators."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from controlplane import kernel
from controlplane.core.ids import Kind, new_id
from controlplane.models.incident import Incident


@pytest.fixture
async def incident(database):
    async with database.sessionmaker.begin() as session:
        subject = new_id(Kind.HOST)
        run_id = await kernel.start(session, "host", subject)
        row = Incident(
            id=new_id(Kind.INCIDENT), code="host.refused", subject=subject, run_id=run_id, program="host", step="connect",
            detail="SSH refused",
        )  # fmt: skip
        session.add(row)
        await session.flush()
        park = "UPDATE run SET parked_at = now(), parked_code = 'host.refused', wake_at = NULL WHERE id = :id"
        await session.execute(text(park), {"id": run_id})
    return row


async def test_resolve_closes_and_resumes(operator, incident, database):
    listed = (await operator.get("/v1/incidents", params={"state": "open"})).json()["items"]
    assert [(item["id"], item["state"], item["detail"]) for item in listed] == [(incident.id, "open", "SSH refused")]
    answer = await operator.post(f"/v1/incidents/{incident.id}/resolve")
    assert answer.status_code == 200, answer.text
    assert answer.json()["state"] == "resolved"
    again = await operator.post(f"/v1/incidents/{incident.id}/resolve", json={"resume": False})
    assert again.json()["resolved_at"] == answer.json()["resolved_at"]
    assert (await operator.get("/v1/incidents", params={"state": "open"})).json()["items"] == []
    async with database.sessionmaker() as session:
        assert await session.scalar(text("SELECT kind FROM signal")) == "resume"
        assert await session.scalar(text("SELECT action FROM audit LIMIT 1")) == "incident.resolve"
    assert incident.run_id in {run_id for run_id, _ in database.publisher.told}


async def test_members_may_not(member, incident):
    assert (await member.get("/v1/incidents")).status_code == 403
    assert (await member.get(f"/v1/incidents/{incident.id}")).status_code == 404
    assert (await member.post(f"/v1/incidents/{incident.id}/resolve")).status_code == 404


async def test_bad_questions(operator):
    assert (await operator.get("/v1/incidents", params={"state": "half"})).status_code == 422
    gone = await operator.get("/v1/incidents/inc_01jd2x4k3fe8v9m2q7t5w0y6za")
    assert (gone.status_code, gone.json()["code"]) == (404, "incident.not_found")
