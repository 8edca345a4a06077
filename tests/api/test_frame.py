"""What every operation gets from the route frame: authentication, problems, idempotency, limits."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import text

PROBLEM = {"type", "title", "status", "detail", "code", "request_id", "errors", "context"}


def check_problem(answer, status: int, code: str) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert set(body) == PROBLEM
    assert body["code"] == code
    assert body["status"] == status
    assert body["request_id"] == answer.headers["x-request-id"]
    return body


async def count(api, table: str) -> int:
    async with api.database.sessionmaker() as session:
        return await session.scalar(text(f"SELECT count(*) FROM {table}"))


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "auth.token_missing"),
        ("Basic abc", "auth.token_missing"),
        ("Bearer ", "auth.token_missing"),
        ("Bearer bpt_wrong", "auth.token_invalid"),
        ("bearer \u00e9".encode("latin-1"), "auth.token_invalid"),
    ],
)
async def test_without_a_good_token(anonymous, header, code):
    headers = {} if header is None else {"authorization": header}
    answer = await anonymous.get("/v1/projects", headers=headers)
    check_problem(answer, 401, code)
    assert answer.headers["www-authenticate"].startswith("Bearer")


async def test_the_token_is_looked_at_before_the_body(anonymous):
    check_problem(await anonymous.post("/v1/projects", content=b"{nonsense"), 401, "auth.token_missing")


@pytest.mark.parametrize(
    ("request_of", "status", "code", "pointers"),
    [
        ({"json": {}}, 422, "request.invalid", ["/name"]),
        ({"json": {"name": "Web"}}, 422, "request.invalid", ["/name"]),
        ({"json": {"name": "a" * 64}}, 422, "request.invalid", ["/name"]),
        ({"json": {"name": "-a"}}, 422, "request.invalid", ["/name"]),
        ({"json": {"name": "a\n"}}, 422, "request.invalid", ["/name"]),
        ({"json": {"name": "a", "color": 1}}, 422, "request.invalid", ["/color"]),
        ({"json": {"name": "a", "labels": {"k": 1}}}, 422, "request.invalid", ["/labels/k"]),
        ({"json": {"name": "a", "labels": {"a/b~c": 5}}}, 422, "request.invalid", None),
        ({"json": {"name": "a\u0000b"}}, 422, "request.invalid", ["/name"]),
        ({"json": {"name": "a", "description": "nul \u0000"}}, 422, "request.invalid", ["/description"]),
        ({"json": []}, 422, "request.invalid", [""]),
        ({"json": "text"}, 422, "request.invalid", [""]),
        ({"content": b""}, 422, "request.invalid", [""]),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, "request.malformed_json", None),
        ({"content": b"\xff\xfe", "headers": {"content-type": "application/json"}}, 400, "request.malformed_json", None),
        (
            {"content": b'{"name":"web","name":"db"}', "headers": {"content-type": "application/json"}},
            400,
            "request.malformed_json",
            None,
        ),
        ({"json": {"name": "web", "allow_containers": 1}}, 422, "request.invalid", ["/allow_containers"]),
        ({"json": {"name": "web", "allow_containers": "yes"}}, 422, "request.invalid", ["/allow_containers"]),
        ({"content": b"name=a", "headers": {"content-type": "text/plain"}}, 415, "request.media_type", None),
        ({"content": b'{"name":"a"}'}, 415, "request.media_type", None),
        ({"content": b"{" * 2_000_000, "headers": {"content-type": "application/json"}}, 413, "request.too_large", None),
    ],
)
async def test_bad_bodies_make_nothing(operator, api, request_of, status, code, pointers):
    before = await count(api, "project"), await count(api, "audit")
    body = check_problem(await operator.post("/v1/projects", **request_of), status, code)
    if pointers is not None:
        assert [item["pointer"] for item in body["errors"]] == pointers
        assert all(item["detail"] for item in body["errors"])
    assert (await count(api, "project"), await count(api, "audit")) == before


async def test_streamed_body_is_limited_too(operator):
    async def chunks():
        for _ in range(40):
            yield b" " * 65536

    answer = await operator.post("/v1/projects", content=chunks(), headers={"content-type": "application/json"})
    check_problem(answer, 413, "request.too_large")


async def test_unknown_paths_and_methods(operator, anonymous):
    for client in (operator, anonymous):
        check_problem(await client.get("/v1/nothing"), 404, "path.not_found")
        check_problem(await client.get("/v1/projects/"), 404, "path.not_found")
        answer = await client.put("/v1/projects", json={})
        check_problem(answer, 405, "path.method_not_allowed")


async def test_path_with_nul_and_overlong_name(operator):
    check_problem(await operator.get("/v1/projects/a%00b"), 404, "project.not_found")
    assert (await operator.get(f"/v1/projects/{'a' * 5000}")).status_code in {404, 422}


async def test_unexpected_error_is_a_problem_without_its_text(api, operator, monkeypatch, caplog):
    async def broken(*args, **kwargs):
        raise RuntimeError("the inner secret")

    monkeypatch.setattr("controlplane.api.frame.audit.record", broken)
    answer = await operator.post("/v1/projects", json={"name": "search"}, headers={"x-request-id": "req-that-fails"})
    body = check_problem(answer, 500, "internal")
    assert "inner secret" not in answer.text
    assert body["request_id"] == "req-that-fails"
    assert "the inner secret" in caplog.text
    assert (await operator.get("/v1/projects/search")).status_code == 404


async def test_database_away_is_503(operator, database):
    await database.engine.dispose()

    async def refuse(*args, **kwargs):
        raise ConnectionRefusedError("no server")

    database.engine.sync_engine.dialect.connect = refuse
    database.engine.sync_engine.pool._creator = refuse
    database.engine.sync_engine.pool._invoke_creator = lambda record: refuse_now()
    answer = await operator.get("/v1/projects")
    check_problem(answer, 503, "unavailable")
    assert answer.headers["retry-after"]
    check_problem(await operator.get("/readyz"), 503, "unavailable")


def refuse_now():
    raise ConnectionRefusedError("no server")


async def test_dead_pooled_connections_are_not_the_clients_business(operator, cut):
    await asyncio.gather(*(operator.get("/v1/projects") for _ in range(5)))
    await cut()
    answers = await asyncio.gather(*(operator.get("/v1/projects") for _ in range(5)))
    assert {answer.status_code for answer in answers} == {200}


@pytest.mark.parametrize("given", ["x" * 200, "a b", "short", "ümlaut-request-id"])
async def test_strange_request_ids_are_replaced(operator, given):
    answer = await operator.get("/v1/projects", headers={"x-request-id": given.encode("latin-1")})
    assert answer.headers["x-request-id"].startswith("req_")


class TestIdempotency:
    async def test_the_same_request_twice_is_done_once(self, operator, api):
        headers = {"idempotency-key": "make-search"}
        first = await operator.post("/v1/projects", json={"name": "search"}, headers=headers)
        second = await operator.post("/v1/projects", json={"name": "search"}, headers=headers)
        assert first.status_code == second.status_code == 201
        assert first.content == second.content
        for name in ("location", "etag"):
            assert first.headers[name] == second.headers[name]
        assert second.headers["idempotency-replayed"] == "true"
        assert await count(api, "audit") == 1

    async def test_another_body_or_path_is_refused(self, operator):
        headers = {"idempotency-key": "make-search"}
        await operator.post("/v1/projects", json={"name": "search"}, headers=headers)
        other = await operator.post("/v1/projects", json={"name": "other"}, headers=headers)
        check_problem(other, 409, "idempotency.mismatch")
        path = await operator.post("/v1/tokens", json={"name": "search"}, headers=headers)
        check_problem(path, 409, "idempotency.mismatch")

    async def test_keys_belong_to_the_token(self, operator, api):
        made = await operator.post("/v1/tokens", json={"name": "second", "role": "operator"})
        headers = {"idempotency-key": "same"}
        await operator.post("/v1/projects", json={"name": "one"}, headers=headers)
        async with api.client(made.json()["secret"]) as second:
            answer = await second.post("/v1/projects", json={"name": "two"}, headers=headers)
        assert answer.status_code == 201

    async def test_a_failed_request_leaves_the_key_free(self, operator):
        headers = {"idempotency-key": "k1"}
        check_problem(await operator.post("/v1/projects", json={"name": "ours"}, headers=headers), 409, "project.name_taken")
        await operator.delete("/v1/projects/ours")
        check_problem(await operator.post("/v1/projects", json={"name": "NO"}, headers=headers), 422, "request.invalid")
        assert (await operator.post("/v1/projects", json={"name": "fresh"}, headers=headers)).status_code == 201

    async def test_ten_at_once_make_one(self, operator, api):
        async def post():
            return await operator.post("/v1/projects", json={"name": "search"}, headers={"idempotency-key": "race"})

        answers = await asyncio.gather(*(post() for _ in range(10)))
        assert {answer.status_code for answer in answers} == {201}
        assert len({answer.content for answer in answers}) == 1
        assert await count(api, "audit") == 1

    async def test_the_stored_answer_is_sealed(self, operator, api):
        headers = {"idempotency-key": "token-once"}
        first = await operator.post("/v1/tokens", json={"name": "ci", "role": "operator"}, headers=headers)
        second = await operator.post("/v1/tokens", json={"name": "ci", "role": "operator"}, headers=headers)
        secret = first.json()["secret"]
        assert second.json()["secret"] == secret
        async with api.database.sessionmaker() as session:
            answer = await session.scalar(text("SELECT answer FROM idempotency_key"))
        assert secret.encode() not in answer

    @pytest.mark.parametrize("key", ["", "k" * 256, "bad\u00e9"])
    async def test_bad_keys(self, operator, key):
        headers = {"idempotency-key": key.encode("latin-1")}
        answer = await operator.post("/v1/projects", json={"name": "search"}, headers=headers)
        body = check_problem(answer, 422, "request.invalid")
        assert body["errors"][0]["source"] == "header"


class TestIfMatch:
    @pytest.mark.parametrize("value", ['"2"', "nonsense", '"1x"', ""])
    async def test_other_generations_are_refused(self, operator, value):
        for method, body in (("PATCH", {"description": "x"}), ("DELETE", None)):
            answer = await operator.request(method, "/v1/projects/ours", json=body, headers={"if-match": value})
            check_problem(answer, 412, "precondition.generation")
        assert (await operator.get("/v1/projects/ours")).json()["generation"] == 1

    @pytest.mark.parametrize("value", ['"1"', 'W/"1"', "1", "*", '"7", "1"'])
    async def test_the_present_generation_passes(self, operator, value):
        answer = await operator.patch("/v1/projects/ours", json={"description": "x"}, headers={"if-match": value})
        assert answer.status_code == 200

    async def test_of_two_writers_one_wins(self, operator):
        async def patch(text):
            return await operator.patch("/v1/projects/ours", json={"description": text}, headers={"if-match": '"1"'})

        answers = await asyncio.gather(*(patch(f"writer {number}") for number in range(5)))
        assert sorted(answer.status_code for answer in answers) == [200, 412, 412, 412, 412]

    async def test_a_change_that_changes_nothing_keeps_the_generation(self, operator):
        answer = await operator.patch("/v1/projects/ours", json={"description": ""})
        assert answer.json()["generation"] == 1


async def test_page_at_root_and_probes(anonymous):
    page = await anonymous.get("/")
    assert page.status_code == 200
    assert "/openapi.json" in page.text
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "id='project.name_taken'" in (await anonymous.get("/docs/errors")).text
    assert (await anonymous.get("/healthz")).json() == {"status": "ok"}
    assert (await anonymous.get("/readyz")).json() == {"status": "ready"}
    metrics = await anonymous.get("/metrics")
    assert "bedplate_api_requests_total" in metrics.text
