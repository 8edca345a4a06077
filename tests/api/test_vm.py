"""VMs through the API: what is asked for, what is refused with which code, and that nothing is half-made."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from sqlalchemy import func, select, text

from controlplane.models.host import Host
from controlplane.models.nic import Nic
from controlplane.models.operation import Operation
from controlplane.models.reservation import Reservation
from controlplane.models.run import Run
from controlplane.models.vm import Vm
from controlplane.models.volume import Volume
from tests.api.fleet import GIB, add_host, lay_ground

VMS = "/v1/projects/ours/vms"
MIB = 1 << 20
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIE1lPw9bTVZkMOyUaCvAlGWYmLKVKwXuNvUSqxb0iTMx me@here"
BODY = {"name": "web-1", "image": "debian", "network": "net", "ssh_keys": [KEY]}


@pytest.fixture(autouse=True)
async def ground(api) -> None:
    await lay_ground(api.database.sessionmaker)
    await add_host(api.database.sessionmaker)


async def counts(api) -> dict[str, int]:
    """Rows by table; of the runs those of VMs, because the network's firewall has its own."""
    async with api.database.sessionmaker() as session:
        models = (Vm, Nic, Volume, Reservation, Operation)
        found = {model.__tablename__: await session.scalar(select(func.count()).select_from(model)) for model in models}
        runs = select(func.count()).select_from(Run).where(Run.program == "vm")
        return {**found, "run": await session.scalar(runs)}


async def test_one_request_places_reserves_and_starts(member, api):
    made = await member.post(VMS, json=BODY)
    assert made.status_code == 201, made.text
    body = made.json()
    assert made.headers["location"] == f"{VMS}/{body['id']}".replace("ours", body["project_id"]) or made.headers[
        "location"
    ].endswith(body["id"])
    assert made.headers["x-operation-id"].startswith("op_")
    assert body["status"] == "preparing"
    assert body["wanted"] == {
        "power": "running",
        "vcpus": 1,
        "memory_bytes": GIB,
        "disk_bytes": GIB,
        "on_guest_poweroff": "stop",
        "restart_generation": 0,
    }
    assert body["observed"]["power"] == "unknown"
    assert body["observed"]["host"] == "a"
    assert [item["type"] for item in body["conditions"]] == ["Placed", "HostReachable", "Ready"]
    assert body["ipv4"] == "10.192.0.2"
    assert body["user"] == "debian"
    assert await counts(api) == {"vm": 1, "nic": 1, "volume": 1, "reservation": 1, "run": 1, "operation": 1}
    assert (await member.get(f"{VMS}/web-1")).json()["id"] == body["id"]
    listed = (await member.get(VMS, params={"filter": "labels.team=x"})).json()
    assert listed["items"] == []
    assert [item["name"] for item in (await member.get(VMS)).json()["items"]] == ["web-1"]


@pytest.mark.parametrize(
    ("changes", "status", "code", "pointer"),
    [
        ({"name": "Web"}, 422, "request.invalid", "/name"),
        ({"name": "-web"}, 422, "request.invalid", "/name"),
        ({"name": ""}, 422, "request.invalid", "/name"),
        ({"name": "a" * 64}, 422, "request.invalid", "/name"),
        ({"name": None}, 422, "request.invalid", "/name"),
        ({"colour": "red"}, 422, "request.invalid", "/colour"),
        ({"vcpus": 0}, 422, "request.invalid", "/vcpus"),
        ({"vcpus": 1.5}, 422, "request.invalid", "/vcpus"),
        ({"vcpus": 100000}, 422, "request.invalid", "/vcpus"),
        ({"memory_bytes": 1}, 422, "request.invalid", "/memory_bytes"),
        ({"memory_bytes": 64 * MIB + 1}, 422, "request.invalid", "/memory_bytes"),
        ({"memory_bytes": 64 * MIB}, 422, "vm.memory_too_small", "/memory_bytes"),
        ({"disk_bytes": -1}, 422, "request.invalid", "/disk_bytes"),
        ({"disk_bytes": MIB}, 422, "vm.disk_too_small", "/disk_bytes"),
        ({"image": "nothing"}, 422, "vm.image_unknown", "/image"),
        ({"image": "img_01jd2x4k3fe8v9m2q7t5w0y6za"}, 422, "vm.image_unknown", "/image"),
        ({"network": "nothing"}, 422, "vm.network_unknown", "/network"),
        ({"user": "root;reboot"}, 422, "request.invalid", "/user"),
        ({"ssh_keys": ["hello"]}, 422, "vm.ssh_key_invalid", "/ssh_keys/0"),
        ({"ssh_keys": ["ssh-rsa " + KEY.split()[1]]}, 422, "vm.ssh_key_invalid", "/ssh_keys/0"),
        ({"ssh_keys": [KEY + "\nssh-ed25519 AAAA"]}, 422, "vm.ssh_key_invalid", "/ssh_keys/0"),
        ({"user_data": "x" * 70000}, 422, "request.invalid", "/user_data"),
        ({"power": "paused"}, 422, "request.invalid", "/power"),
        ({"labels": {"k": 1}}, 422, "request.invalid", "/labels/k"),
        ({"isolation": "container"}, 403, "vm.containers_not_allowed", None),
        ({"placement": {"host": "a"}}, 403, "vm.host_forbidden", None),
        ({"placement": {"rack": "a"}}, 422, "request.invalid", "/placement/rack"),
        ({"vcpus": 5}, 507, "vm.no_capacity", None),
        ({"memory_bytes": 9 * GIB}, 507, "vm.no_capacity", None),
        ({"placement": {"location": "moon"}}, 507, "vm.no_capacity", None),
    ],
)
async def test_refused_and_nothing_made(member, api, changes, status, code, pointer):
    answer = await member.post(VMS, json=BODY | changes)
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    if pointer is not None:
        assert pointer in [item["pointer"] for item in answer.json()["errors"]]
    assert set((await counts(api)).values()) == {0}
    async with api.database.sessionmaker() as session:
        assert await session.scalar(select(Host.reserved_vcpus)) == 0


async def test_guest_images_boot_as_vms_only(operator):
    await operator.patch("/v1/projects/ours", json={"allow_containers": True})
    answer = await operator.post(VMS, json=BODY | {"isolation": "container"})
    assert (answer.status_code, answer.json()["code"]) == (422, "vm.isolation_unsupported")


async def test_malformed_bodies(member):
    bad = await member.post(VMS, content=b"{", headers={"content-type": "application/json"})
    assert (bad.status_code, bad.json()["code"]) == (400, "request.malformed_json")
    large = await member.post(VMS, content=b"x" * (2 << 20), headers={"content-type": "application/json"})
    assert (large.status_code, large.json()["code"]) == (413, "request.too_large")


async def test_no_token_and_wrong_token_and_a_strangers_token(anonymous, stranger, api):
    assert (await anonymous.post(VMS, json=BODY)).status_code == 401
    assert (await stranger.post(VMS, json=BODY)).status_code == 404
    async with api.client("bp_wrong") as client:
        assert (await client.post(VMS, json=BODY)).status_code == 401


async def test_an_unknown_hosts_name_is_said_to_operators(operator):
    answer = await operator.post(VMS, json=BODY | {"placement": {"host": "nowhere"}})
    assert (answer.status_code, answer.json()["code"]) == (422, "vm.host_unknown")


async def test_a_full_fleet_answers_507_with_the_explanation(member):
    assert (await member.post(VMS, json=BODY | {"vcpus": 3})).status_code == 201
    full = await member.post(VMS, json=BODY | {"name": "web-2", "vcpus": 2})
    assert full.status_code == 507
    problem = full.json()
    assert problem["detail"] == "None of 1 hosts can take it: 1 without 2 free cores (most free: 1)."
    assert problem["context"]["placement"]["short"] == [
        {"filter": "vcpus", "hosts": 1, "reason": "without 2 free cores", "needed": 2, "most_free": 1}
    ]
    assert (await member.get(f"{VMS}/web-2")).status_code == 404


async def test_on_no_capacity_wait_makes_it_and_shows_the_condition(member, api):
    made = await member.post(VMS, json=BODY | {"vcpus": 5, "on_no_capacity": "wait"})
    assert made.status_code == 201, made.text
    body = made.json()
    assert body["status"] == "waiting"
    placed = next(item for item in body["conditions"] if item["type"] == "Placed")
    assert (placed["status"], placed["reason"]) == ("false", "vm.no_capacity")
    assert "without 5 free cores" in placed["message"]
    assert (await counts(api))["reservation"] == 0


async def test_names_are_taken_once(member, api):
    assert (await member.post(VMS, json=BODY)).status_code == 201
    again = await member.post(VMS, json=BODY)
    assert (again.status_code, again.json()["code"]) == (409, "vm.name_taken")
    assert (await counts(api))["reservation"] == 1


async def test_idempotency_key(member, api):
    headers = {"idempotency-key": "the-first"}
    first = await member.post(VMS, json=BODY, headers=headers)
    again = await member.post(VMS, json=BODY, headers=headers)
    assert first.json()["id"] == again.json()["id"]
    other = await member.post(VMS, json=BODY | {"vcpus": 2}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (409, "idempotency.mismatch")
    assert (await counts(api))["vm"] == 1


async def test_many_at_once_take_what_there_is_and_different_addresses(operator, api):
    await add_host(api.database.sessionmaker, "b")

    async def ask(n: int):
        return await operator.post(VMS, json=BODY | {"name": f"web-{n}", "memory_bytes": 256 * MIB})

    answers = await asyncio.gather(*(ask(n) for n in range(12)))
    assert Counter(answer.status_code for answer in answers) == {201: 8, 507: 4}
    addresses = {answer.json()["ipv4"] for answer in answers if answer.status_code == 201}
    assert len(addresses) == 8
    assert (await counts(api))["reservation"] == 8


async def test_actions_change_what_is_wanted(member):
    made = (await member.post(VMS, json=BODY)).json()
    stopped = await member.post(f"{VMS}/web-1/stop")
    assert stopped.status_code == 200, stopped.text
    assert (stopped.json()["wanted"]["power"], stopped.json()["generation"]) == ("stopped", 2)
    assert stopped.headers["etag"] == '"2"'
    refused = await member.post(f"{VMS}/web-1/restart")
    assert (refused.status_code, refused.json()["code"]) == (409, "vm.stopped")
    started = (await member.post(f"{VMS}/{made['id']}/start")).json()
    assert (started["wanted"]["power"], started["generation"]) == ("running", 3)
    restarted = (await member.post(f"{VMS}/web-1/restart")).json()
    assert restarted["wanted"]["restart_generation"] == 1
    changed = await member.patch(f"{VMS}/web-1", json={"labels": {"team": "x"}}, headers={"if-match": '"4"'})
    assert (changed.status_code, changed.json()["labels"]) == (200, {"team": "x"})
    stale = await member.patch(f"{VMS}/web-1", json={"labels": {}}, headers={"if-match": '"4"'})
    assert stale.status_code == 412
    empty = await member.post(f"{VMS}/web-1/resize", json={})
    assert (empty.status_code, empty.json()["code"]) == (422, "request.invalid")
    assert (await member.post(f"{VMS}/nothing/stop")).json()["code"] == "vm.not_found"


async def test_resize_of_a_running_vm_waits_for_a_restart_and_needs_room(member, api):
    await member.post(VMS, json=BODY)
    async with api.database.sessionmaker.begin() as session:
        await session.execute(text("UPDATE vm SET observed_power = 'running', observed_at = now()"))
    grown = await member.post(f"{VMS}/web-1/resize", json={"vcpus": 3})
    assert grown.status_code == 200, grown.text
    assert (grown.json()["wanted"]["vcpus"], grown.json()["observed"]["vcpus"]) == (3, 1)
    assert "ResizePending" in [item["type"] for item in grown.json()["conditions"]]
    refused = await member.post(f"{VMS}/web-1/resize", json={"vcpus": 5})
    assert (refused.status_code, refused.json()["code"]) == (507, "vm.no_capacity")
    restarted = (await member.post(f"{VMS}/web-1/restart")).json()
    assert restarted["observed"]["vcpus"] == 3


async def test_a_protected_vm_stays(member):
    await member.post(VMS, json=BODY | {"is_protected": True})
    refused = await member.delete(f"{VMS}/web-1")
    assert (refused.status_code, refused.json()["code"]) == (409, "vm.protected")
    await member.patch(f"{VMS}/web-1", json={"is_protected": False})
    going = await member.delete(f"{VMS}/web-1")
    assert (going.status_code, going.json()["status"]) == (202, "deleting")
    assert (await member.delete(f"{VMS}/web-1")).status_code == 202
    for action in ("start", "stop", "restart"):
        late = await member.post(f"{VMS}/web-1/{action}")
        assert (late.status_code, late.json()["code"]) == (409, "vm.deleting")
    assert (await member.delete(f"{VMS}/never-was")).status_code == 204


async def test_user_data_is_sealed_and_never_shown(member, api):
    secret = "#!/bin/sh\necho planted-secret-5b1f\n"
    made = await member.post(VMS, json=BODY | {"user_data": secret})
    assert "planted-secret-5b1f" not in made.text
    assert "planted-secret-5b1f" not in (await member.get(f"{VMS}/web-1")).text
    async with api.database.sessionmaker() as session:
        for table in ("vm", "audit", "event", "run", "signal"):
            rows = (await session.execute(text(f"SELECT t::text FROM {table} t"))).scalars()
            assert not any("planted-secret-5b1f" in row for row in rows), table


async def test_placement_is_explained_without_making_anything(member, operator):
    assert (await member.post("/v1/placements/explain", json={"vcpus": 8})).status_code == 403
    seen = (await operator.post("/v1/placements/explain", json={"vcpus": 8})).json()
    assert (seen["fitting"], seen["short"][0]["filter"]) == (0, "vcpus")
    assert [(item["name"], item["rejected_by"]) for item in seen["verdicts"]] == [("a", ["vcpus"])]
    assert (await operator.post("/v1/placements/explain", json={})).json()["fitting"] == 1
