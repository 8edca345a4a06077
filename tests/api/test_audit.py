"""The audit trail as an operator and a member read it."""

from __future__ import annotations


async def test_who_changed_what(operator, member, stranger):
    await operator.patch("/v1/projects/ours", json={"description": "x"})
    made = (await operator.post("/v1/tokens", json={"name": "ci", "project": "ours"})).json()
    entries = (await operator.get("/v1/audit", params={"sort": "-id"})).json()["items"]
    assert (entries[0]["action"], entries[0]["subject_id"]) == ("token.create", made["id"])
    assert entries[0]["after"]["secret_sha256"] == "•••"
    assert made["secret"] not in str(entries)
    assert {entry["actor_name"] for entry in entries} == {"operator"}

    seen = (await member.get("/v1/projects/ours/audit", params={"filter": "action~project"})).json()["items"]
    assert [entry["action"] for entry in seen] == ["project.update"]
    assert (seen[0]["before"]["description"], seen[0]["after"]["description"]) == ("", "x")
    assert (await member.get("/v1/audit")).status_code == 403
    assert (await stranger.get("/v1/projects/ours/audit")).status_code == 404
