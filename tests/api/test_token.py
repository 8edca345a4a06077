"""Bearer tokens: shown once, stored as a digest, scoped, expiring, revoked at once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from controlplane.identity.service import ensure_operator_token


async def test_life_of_a_member_token(operator, api):
    made = await operator.post("/v1/tokens", json={"name": "ci", "project": "ours"})
    assert made.status_code == 201, made.text
    body = made.json()
    secret = body["secret"]
    assert body["role"] == "member"
    assert body["hint"] == secret[-4:]

    async with api.client(secret) as holder:
        me = (await holder.get("/v1/tokens/current")).json()
        assert me["name"] == "ci"
        assert [item["name"] for item in (await holder.get("/v1/projects")).json()["items"]] == ["ours"]
        assert (await holder.get("/v1/tokens")).status_code == 403
        assert (await holder.get("/v1/tokens/ci")).status_code == 404

        shown = (await operator.get("/v1/tokens/ci")).json()
        assert "secret" not in shown
        assert shown["last_used_at"] is not None
        assert (await operator.delete("/v1/tokens/ci")).status_code == 204
        assert (await operator.delete("/v1/tokens/ci")).status_code == 204
        refused = await holder.get("/v1/tokens/current")
        assert refused.status_code == 401
        assert refused.json()["code"] == "auth.token_invalid"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"name": "x"}, 422, "token.role_invalid"),
        ({"name": "x", "role": "operator", "project": "ours"}, 422, "token.role_invalid"),
        ({"name": "x", "role": "king"}, 422, "request.invalid"),
        ({"name": "x", "project": "nothing"}, 404, "project.not_found"),
        ({"name": "member", "project": "ours"}, 409, "token.name_taken"),
        ({"name": "x", "project": "ours", "expires_at": "2020-01-01T00:00:00Z"}, 422, "token.expiry_invalid"),
        ({"name": "x", "project": "ours", "expires_at": "2030-01-01T00:00:00"}, 422, "request.invalid"),
        ({"name": "x", "project": "ours", "secret": "mine"}, 422, "request.invalid"),
    ],
)
async def test_bad_tokens_are_not_made(operator, body, status, code):
    answer = await operator.post("/v1/tokens", json=body)
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert len((await operator.get("/v1/tokens")).json()["items"]) == 4


async def test_an_expired_token_is_refused(operator, api):
    soon = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    made = (await operator.post("/v1/tokens", json={"name": "brief", "project": "ours", "expires_at": soon})).json()
    async with api.client(made["secret"]) as holder:
        assert (await holder.get("/v1/projects/ours")).status_code == 200
        async with api.database.sessionmaker.begin() as session:
            await session.execute(text("UPDATE token SET expires_at = now() - interval '1 s' WHERE name = 'brief'"))
        assert (await holder.get("/v1/projects/ours")).status_code == 401


async def test_deleting_a_project_revokes_its_tokens(operator, member):
    assert (await member.get("/v1/projects/ours")).status_code == 200
    assert (await operator.delete("/v1/projects/ours")).status_code == 204
    assert (await member.get("/v1/projects/ours")).status_code == 401


async def test_the_first_operator_token_is_made_once(database, tmp_path):
    async with database.sessionmaker.begin() as session:
        first = await ensure_operator_token(session, tmp_path)
    async with database.sessionmaker.begin() as session:
        assert await ensure_operator_token(session, tmp_path) is None
    path = tmp_path / "operator-token"
    assert path.read_text() == f"{first}\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [item.name for item in tmp_path.iterdir()] == ["operator-token"]


async def test_no_plain_token_rests_in_the_database(operator, api, database_url):
    """Neither in rows nor in audit, events and stored answers."""
    headers = {"idempotency-key": "planted"}
    secret = (await operator.post("/v1/tokens", json={"name": "ci", "project": "ours"}, headers=headers)).json()["secret"]
    async with api.database.sessionmaker() as session:
        tables = await session.scalars(text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'"))
        for table in tables.all():
            rows = await session.scalars(text(f'SELECT row_to_json(t)::text FROM "{table}" AS t'))
            dump = "\n".join(rows.all())
            for hidden in (secret, api.operator_token, secret.encode().hex(), api.operator_token.encode().hex()):
                assert hidden not in dump, table
