"""Many clients at once: one key makes one thing, one generation has one winner, one name belongs to one, what is used stays."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import httpx2
import pytest
from sqlalchemy import text

from tests.api.fleet import add_host, lay_ground, manifest

OURS = "/v1/projects/ours"
VM = {"name": "web", "image": "debian", "network": "net", "memory_bytes": 128 << 20}
# path, body: what a member or operator makes by one POST
THINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "project": ("/v1/projects", {"name": "search"}),
    "image": ("/v1/images", {"manifest": manifest("other")}),
    "network": (f"{OURS}/networks", {"name": "back"}),
    "vm": (f"{OURS}/vms", VM),
    "key": (f"{OURS}/keys", {"name": "app"}),
    "firewall": (f"{OURS}/firewalls", {"name": "web"}),
}
MANY = 20


@pytest.fixture
async def ground(api):
    """A host with room, an image and a network."""
    await lay_ground(api.database.sessionmaker)
    await add_host(api.database.sessionmaker, cpus=64, memory_bytes=64 << 30)


async def at_once(*requests: Any) -> list[httpx2.Response]:
    return list(await asyncio.gather(*requests))


async def names(client: httpx2.AsyncClient, path: str, name: str) -> int:
    return sum(item["name"] == name for item in (await client.get(path, params={"limit": 1000})).json()["items"])


@pytest.mark.parametrize("noun", THINGS)
async def test_one_idempotency_key_makes_one(operator, api, ground, noun):
    path, body = THINGS[noun]
    headers = {"idempotency-key": f"make-{noun}"}
    answers = await at_once(*(operator.post(path, json=body, headers=headers) for _ in range(MANY)))
    assert Counter(answer.status_code for answer in answers) == {201: MANY}, [answer.text for answer in answers][:2]
    assert len({answer.content for answer in answers}) == 1
    assert len({answer.headers["location"] for answer in answers}) == 1
    name = body.get("name") or "other"
    assert await names(operator, path, name) == 1
    async with api.database.sessionmaker() as session:
        made = await session.scalar(text("SELECT count(*) FROM audit WHERE action = :action"), {"action": f"{noun}.create"})
    assert made == 1


@pytest.mark.parametrize("noun", THINGS)
async def test_a_name_belongs_to_one(operator, ground, noun):
    path, body = THINGS[noun]
    answers = await at_once(*(operator.post(path, json=body) for _ in range(MANY)))
    assert Counter(answer.status_code for answer in answers) == {201: 1, 409: MANY - 1}, [answer.text for answer in answers][:2]
    assert {answer.json()["code"] for answer in answers if answer.status_code == 409} == {f"{noun}.name_taken"}
    assert await names(operator, path, body.get("name") or "other") == 1


@pytest.mark.parametrize("noun", ["project", "vm", "network", "firewall"])
async def test_one_generation_has_one_winner(operator, ground, noun):
    path, body = THINGS[noun]
    made = await operator.post(path, json=body)
    one, etag = f"{path}/{made.json()['id']}", made.headers["etag"]
    changes = (operator.patch(one, json={"labels": {"by": f"w{n}"}}, headers={"if-match": etag}) for n in range(MANY))
    answers = await at_once(*changes)
    assert Counter(answer.status_code for answer in answers) == {200: 1, 412: MANY - 1}, [answer.text for answer in answers][:2]
    assert {answer.json()["code"] for answer in answers if answer.status_code == 412} == {"precondition.generation"}
    winner = next(answer.json() for answer in answers if answer.status_code == 200)
    assert (await operator.get(one)).json()["labels"] == winner["labels"]
    assert winner["generation"] == made.json()["generation"] + 1


async def test_what_is_used_stays_and_says_by_whom(operator, member, ground):
    assert (await member.post(f"{OURS}/vms", json=VM)).status_code == 201
    for client, path, code in (
        (member, f"{OURS}/networks/net", "network.in_use"),
        (operator, "/v1/images/debian", "image.in_use"),
        (operator, "/v1/hosts/a", "host.not_empty"),
        (operator, "/v1/projects/ours", "project.not_empty"),
    ):
        refused = await at_once(*(client.delete(path) for _ in range(4)))
        assert {(answer.status_code, answer.json()["code"]) for answer in refused} == {(409, code)}, path
        assert {answer.headers["content-type"] for answer in refused} == {"application/problem+json"}
        assert (await client.get(path)).status_code == 200


async def test_a_delete_and_a_create_on_it_do_not_both_win(operator, member, ground):
    """The network goes or gets a machine, never both; nothing hangs and nothing is a 5xx."""
    for number in range(10):
        name = f"n{number}"
        assert (await member.post(f"{OURS}/networks", json={"name": name})).status_code == 201
        vm = VM | {"name": f"vm{number}", "network": name}
        created, deleted = await at_once(member.post(f"{OURS}/vms", json=vm), member.delete(f"{OURS}/networks/{name}"))
        won = (created.status_code, deleted.status_code)
        assert won in {(201, 409), (422, 204)}, (won, created.text, deleted.text)


async def test_a_project_goes_or_gets_something(operator, ground):
    for number in range(10):
        assert (await operator.post("/v1/projects", json={"name": f"p{number}"})).status_code == 201
        path = f"/v1/projects/p{number}"
        created, deleted = await at_once(operator.post(f"{path}/networks", json={"name": "net"}), operator.delete(path))
        won = (created.status_code, deleted.status_code)
        assert won in {(201, 409), (404, 204), (409, 204)}, (won, created.text, deleted.text)


async def test_two_deletes_are_one(member, ground):
    assert (await member.post(f"{OURS}/vms", json=VM)).status_code == 201
    answers = await at_once(*(member.delete(f"{OURS}/vms/web") for _ in range(MANY)))
    assert {answer.status_code for answer in answers} <= {202, 204}
    listed = (await member.get("/v1/operations", params={"filter": "action=vm.delete", "limit": 1000})).json()["items"]
    assert len({item["subject_id"] for item in listed}) == 1
    assert Counter(item["state"] for item in listed)["failed"] == 0
