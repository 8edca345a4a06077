"""Routes: public model names over endpoints of the own project; usage beside them."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import asyncpg
import pytest
import yaml

from controlplane.core.ids import Kind, new_id
from controlplane.metering.journal import Journal
from controlplane.metering.landing import Lander
from controlplane.metering.record import Closing, Outcome

ROUTES = "/v1/projects/ours/routes"
INSERT = """INSERT INTO endpoint (id, project_id, name, model, spec, replicas, vcpus, memory_bytes)
            SELECT $1, id, $2, 'm', $3, 1, 1, 1 << 30 FROM project WHERE name = $4"""


@pytest.fixture
async def endpoints(api, database_url) -> dict[str, str]:
    """Ids of endpoints `a` and `b` of ours and `c` of theirs."""
    connection = await asyncpg.connect(database_url)
    found = {}
    for name, project in (("a", "ours"), ("b", "ours"), ("c", "theirs")):
        found[name] = new_id(Kind.ENDPOINT)
        await connection.execute(INSERT, found[name], name, json.dumps({"served_model_id": "m"}), project)
    await connection.close()
    return found


async def test_life(member, endpoints) -> None:
    body = {"name": "org/chat:1", "targets": [{"endpoint": "a", "weight": 3}, {"endpoint": endpoints["b"]}]}
    made = await member.post(ROUTES, json={**body, "timeouts": {"idle": 30}})
    assert made.status_code == 201, made.text
    assert [(target["endpoint"], target["weight"]) for target in made.json()["targets"]] == [("a", 3), ("b", 1)]
    assert made.json()["timeouts"] == {"idle": 30}
    route = f"{ROUTES}/{made.json()['id']}"
    changed = await member.patch(route, json={"targets": [{"endpoint": "b"}]})
    assert [target["endpoint"] for target in changed.json()["targets"]] == ["b"]
    assert changed.json()["generation"] == 2
    listed = (await member.get(ROUTES)).json()["items"]
    assert [(item["name"], item["targets"][0]["endpoint"]) for item in listed] == [("org/chat:1", "b")]
    assert (await member.delete(route)).status_code == 204
    assert (await member.get(route)).json()["code"] == "route.not_found"


async def test_refusals(member, endpoints) -> None:
    good = {"name": "chat", "targets": [{"endpoint": "a"}]}
    assert (await member.post(ROUTES, json=good)).status_code == 201
    for change, status, code in (
        ({}, 409, "route.name_taken"),
        ({"name": "b", "targets": [{"endpoint": "c"}]}, 422, "route.target_invalid"),
        ({"name": "b", "targets": [{"endpoint": "a"}, {"endpoint": endpoints["a"]}]}, 422, "route.target_invalid"),
        ({"name": "b", "targets": []}, 422, "request.invalid"),
        ({"name": "with space"}, 422, "request.invalid"),
        ({"name": "b", "timeouts": {"idle": -1}}, 422, "request.invalid"),
    ):
        answer = await member.post(ROUTES, json={**good, **change})
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert len((await member.get(ROUTES)).json()["items"]) == 1


AS_WRITTEN = """
routes: [{name: chat-model, targets: [{model: qwen-7b, weight: 70, fallback: deepseek-7b}, {model: kimi-7b, weight: 30}],
          retry_policy: {max_attempts: 3, backoff: 200ms}}]
"""


async def test_targets_may_name_the_model_they_serve(member, endpoints, database_url) -> None:
    connection = await asyncpg.connect(database_url)
    for name in ("qwen-7b", "deepseek-7b", "kimi-7b"):
        await connection.execute(INSERT.replace("'m'", "$2"), new_id(Kind.ENDPOINT), name, "{}", "ours")
    await connection.execute("UPDATE endpoint SET name = 'serving-' || split_part(model, '-', 1) WHERE model <> 'm'")
    await connection.close()
    (route,) = yaml.safe_load(AS_WRITTEN)["routes"]
    made = await member.post(ROUTES, json=route)
    assert made.status_code == 201, made.text
    shown = [(target["endpoint"], target["weight"], target["fallback"]) for target in made.json()["targets"]]
    assert shown == [("serving-kimi", 30, None), ("serving-qwen", 70, "serving-deepseek")]
    assert made.json()["retry_policy"] == {"max_attempts": 3, "backoff": "200ms"}
    twice = await member.post(ROUTES, json={"name": "b", "targets": [{"model": "m"}]})
    assert (twice.status_code, twice.json()["code"]) == (422, "route.target_invalid")
    assert "several endpoints serve m" in twice.json()["detail"]


async def test_rules_and_fallbacks(member, endpoints) -> None:
    rule = {"name": "long", "match": {"min_prompt_tokens": 8000, "headers": {"X-Tier": "gold"}}, "targets": [{"endpoint": "b"}]}
    good = {"name": "chat", "targets": [{"endpoint": "a", "fallback": "b"}], "rules": [rule], "affinity": {"kind": "prefix"}}
    made = await member.post(ROUTES, json=good)
    assert made.status_code == 201, made.text
    assert made.json()["rules"][0]["match"] == {"min_prompt_tokens": 8000, "headers": {"X-Tier": "gold"}}
    assert made.json()["rules"][0]["targets"][0]["endpoint"] == "b"
    assert made.json()["affinity"]["kind"] == "prefix"
    for change, pointer in (
        ({"targets": [{"endpoint": "a", "fallback": "a"}]}, "/targets/0/fallback"),
        ({"targets": [{"endpoint": "a", "fallback": "c"}]}, "/targets/0/fallback"),
        ({"rules": [rule, rule]}, "/rules/1/name"),
        ({"rules": [{**rule, "name": "default"}]}, "/rules/0/name"),
        ({"rules": [{**rule, "targets": [{"endpoint": "none"}]}]}, "/rules/0/targets/0/endpoint"),
        ({"retry_policy": {"backoff": "soon"}}, "/retry_policy/backoff"),
        ({"retry_policy": {"max_attempts": 0}}, "/retry_policy/max_attempts"),
        ({"affinity": {"kind": "luck"}}, "/affinity/kind"),
    ):
        answer = await member.post(ROUTES, json={**good, "name": "other", **change})
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, pointer), answer.text
    cleared = await member.patch(f"{ROUTES}/chat", json={"rules": []})
    assert cleared.json()["rules"] == []
    assert cleared.json()["targets"][0]["fallback"] == "b"


async def test_usage(member, stranger, operator, database_url, tmp_path) -> None:
    """Long, because a record has many fields and three views."""
    key = (await member.post("/v1/projects/ours/keys", json={"name": "app"})).json()
    project_id = (await operator.get("/v1/projects/ours")).json()["id"]
    journal = Journal(tmp_path / "journal")
    for number in range(3):
        opening = journal.open(
            project_id=project_id,
            key_id=key["id"],
            model="chat" if number else "other",
            endpoint_id="ep_1",
            replica_id="rep_1",
            request_id=f"r{number}",
            path="/v1/chat/completions",
            is_stream=True,
            prompt_estimate=1,
        )
        closing = Closing(
            ended_at=opening.started_at + 1,
            outcome=Outcome.COMPLETED,
            status=200,
            endpoint_id="ep_1",
            replica_id="rep_1",
            prompt_tokens=7,
            completion_tokens=3,
            is_estimated=False,
            is_billable=True,
        )
        journal.close(opening, closing)
    connection = await asyncpg.connect(database_url)
    await Lander(journal, "gw0").run_once(connection)
    await connection.close()
    journal.shut()
    usage = "/v1/projects/ours/usage"
    hourly = (await member.get(usage)).json()["items"]
    assert [(row["model"], row["key"], row["requests"], row["prompt_tokens"]) for row in hourly] == [
        ("chat", "app", 2, 14),
        ("other", "app", 1, 7),
    ]
    total = (await member.get(usage, params={"by": "total", "model": "chat"})).json()["items"]
    assert [(row["hour"], row["completion_tokens"]) for row in total] == [(None, 6)]
    records = (await member.get(f"{usage}/records", params={"key": "app", "limit": 2})).json()["items"]
    assert [record["request_id"] for record in records] == ["r2", "r1"]
    assert (await stranger.get(usage)).status_code == 404
    now = datetime.now(UTC).isoformat()
    wrong = await member.get(usage, params={"since": now, "until": now})
    assert (wrong.status_code, wrong.json()["code"]) == (422, "usage.range_invalid")
