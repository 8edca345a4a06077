"""Projects through the API: what an operator and a member see and may do."""

from __future__ import annotations

from sqlalchemy import text


async def test_life_of_a_project(operator):
    made = await operator.post("/v1/projects", json={"name": "search", "labels": {"team": "a"}})
    assert made.status_code == 201, made.text
    body = made.json()
    assert body["id"].startswith("proj_")
    assert made.headers["location"] == f"/v1/projects/{body['id']}"
    assert made.headers["etag"] == '"1"'

    for ref in ("search", body["id"]):
        shown = await operator.get(f"/v1/projects/{ref}")
        assert shown.json() == body

    changed = await operator.patch("/v1/projects/search", json={"description": "x"}, headers={"if-match": '"1"'})
    assert changed.status_code == 200, changed.text
    assert changed.json()["generation"] == 2
    assert changed.headers["etag"] == '"2"'
    assert changed.json()["labels"] == {"team": "a"}

    stale = await operator.patch("/v1/projects/search", json={"description": "y"}, headers={"if-match": '"1"'})
    assert stale.status_code == 412
    assert stale.json()["code"] == "precondition.generation"

    assert (await operator.delete("/v1/projects/search")).status_code == 204
    assert (await operator.delete("/v1/projects/search")).status_code == 204
    gone = await operator.get("/v1/projects/search")
    assert gone.status_code == 404
    assert gone.json()["code"] == "project.not_found"


async def test_unchanged_resource_is_304(operator):
    shown = await operator.get("/v1/projects/ours")
    again = await operator.get("/v1/projects/ours", headers={"if-none-match": shown.headers["etag"]})
    assert again.status_code == 304
    assert again.content == b""


async def test_name_taken(operator):
    taken = await operator.post("/v1/projects", json={"name": "ours"})
    assert taken.status_code == 409
    assert taken.json()["code"] == "project.name_taken"


async def test_members_see_their_project_only(member, stranger):
    assert [item["name"] for item in (await member.get("/v1/projects")).json()["items"]] == ["ours"]
    assert (await member.get("/v1/projects/ours")).status_code == 200
    hidden = await stranger.get("/v1/projects/ours")
    absent = await stranger.get("/v1/projects/nothing")
    assert hidden.status_code == absent.status_code == 404
    assert hidden.json()["code"] == absent.json()["code"] == "project.not_found"
    assert (await member.delete("/v1/projects/ours")).status_code == 403
    assert (await stranger.delete("/v1/projects/ours")).status_code == 404
    assert (await member.post("/v1/projects", json={"name": "more"})).status_code == 403


async def test_every_change_is_audited_in_its_own_transaction(operator, api):
    made = await operator.post("/v1/projects", json={"name": "search"}, headers={"x-request-id": "req-of-this-test"})
    await operator.patch("/v1/projects/search", json={"description": "x"})
    await operator.post("/v1/projects", json={"name": "search"})
    await operator.delete("/v1/projects/search")
    async with api.database.sessionmaker() as session:
        query = text("SELECT action, request_id, before, after FROM audit WHERE subject_id = :id ORDER BY id")
        rows = (await session.execute(query, {"id": made.json()["id"]})).all()
    assert [row.action for row in rows] == ["project.create", "project.update", "project.delete"]
    assert rows[0].request_id == "req-of-this-test"
    assert rows[0].before is None
    assert rows[0].after["name"] == "search"
    assert rows[1].before["description"] == ""
    assert rows[1].after["description"] == "x"
    assert rows[2].after is None
