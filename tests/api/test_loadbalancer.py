"""Load balancers through the API: what may be asked for, and that what is refused leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api.fleet import add_host, lay_ground

LBS = "/v1/projects/ours/loadbalancers"
WEB = {"name": "web", "listeners": [{"port": 80, "target_port": 8080}], "network": "net"}


@pytest.fixture
async def ground(api, operator, member):
    """Two VMs in a network, a pool and a reserved address."""
    await lay_ground(api.database.sessionmaker)
    await add_host(api.database.sessionmaker, cpus=8)
    for name in ("one", "two"):
        body = {"name": name, "image": "debian", "network": "net"}
        assert (await member.post("/v1/projects/ours/vms", json=body)).status_code == 201
    assert (await operator.post("/v1/pools", json={"name": "uplink", "cidr": "203.0.113.0/24"})).status_code == 201
    assert (await member.post("/v1/projects/ours/addresses", json={"name": "front"})).status_code == 201


async def test_life_of_a_load_balancer(ground, member):
    body = {**WEB, "addresses": ["front"], "backends": [{"vm": "one"}, {"vm": "two", "weight": 256}]}
    made = await member.post(LBS, json=body)
    assert made.status_code == 201, made.text
    shown = made.json()
    assert shown["vips"][0] == "203.0.113.1"
    assert len(shown["vips"]) == 3
    assert [(backend["target"], backend["weight"], backend["wanted"]) for backend in shown["backends"]] == [
        ("one", 1, "active"),
        ("two", 256, "active"),
    ]
    assert {one["reason"] for one in shown["conditions"] if one["status"] == "false"} >= {"loadbalancer.no_edge"}
    used = await member.post(LBS, json={**WEB, "name": "other", "addresses": ["front"]})
    assert (used.status_code, used.json()["code"]) == (409, "loadbalancer.address_in_use")

    drained = await member.post(f"{LBS}/web/backends/one/drain")
    assert [backend["wanted"] for backend in drained.json()["backends"]] == ["draining", "active"]
    ejected = await member.post(f"{LBS}/web/backends/two/eject", json={"seconds": 60, "reason": "slow"})
    assert (ejected.json()["backends"][1]["wanted"], ejected.json()["backends"][1]["ejected_reason"]) == ("ejected", "slow")
    back = await member.post(f"{LBS}/web/backends/one/activate")
    assert back.json()["backends"][0]["wanted"] == "active"
    assert len((await member.post(f"{LBS}/web/backends/one/remove")).json()["backends"]) == 1
    added = await member.post(f"{LBS}/web/backends", json={"address": shown["backends"][0]["machines"][0]["ipv4"]})
    assert [backend["target"] for backend in added.json()["backends"]] == ["two", "one"]
    changed = await member.patch(f"{LBS}/web", json={"profile": "grpc", "probe": None, "listeners": [{"port": 443}]})
    assert (changed.json()["profile"], changed.json()["probe"], changed.json()["listeners"][0]["target_port"]) == (
        "grpc",
        None,
        443,
    )

    gone = await member.delete(f"{LBS}/web")
    assert (gone.status_code, gone.json()["name"]) == (202, "web")
    late = await member.post(f"{LBS}/web/backends", json={"vm": "one"})
    assert (late.status_code, late.json()["code"]) == (409, "loadbalancer.deleting")


async def test_what_a_load_balancer_uses_stays(ground, member):
    """Its network and its address are in use; a machine behind it may go."""
    body = {**WEB, "addresses": ["front"], "backends": [{"vm": "one"}, {"vm": "two"}]}
    assert (await member.post(LBS, json=body)).status_code == 201
    network = await member.delete("/v1/projects/ours/networks/net")
    assert (network.status_code, network.json()["code"]) == (409, "network.in_use")
    assert network.json()["detail"] == "load balancers serve in net: web"
    address = await member.delete("/v1/projects/ours/addresses/front")
    assert (address.status_code, address.json()["code"]) == (409, "address.in_use")
    assert address.json()["detail"] == "front is attached to load balancer web: detach it first"
    assert (await member.delete("/v1/projects/ours/vms/one")).status_code == 202


async def test_its_own_firewall_stands_in_nobodys_way(ground, member):
    """What it keeps under its own name is found by id alone; the tenant's firewall of that name stays the tenant's."""
    firewalls = "/v1/projects/ours/firewalls"
    mine = (await member.post(firewalls, json={"name": "web"})).json()
    assert (await member.post(LBS, json={**WEB, "backends": [{"vm": "one"}]})).status_code == 201
    for description in ("a", "b"):
        changed = await member.patch(f"{firewalls}/web", json={"description": description})
        assert (changed.status_code, changed.json().get("id")) == (200, mine["id"]), changed.text
    assert (await member.get(f"{firewalls}/web")).json()["id"] == mine["id"]
    assert (await member.delete(f"{firewalls}/web")).status_code in (202, 204)


async def test_alertmanager_ejects_and_brings_back(ground, member):
    """By the bodies that Alertmanager 0.25.0 sent to a receiver of its webhooks."""
    assert (await member.post(LBS, json={**WEB, "backends": [{"vm": "one"}]})).status_code == 201
    firing, resolving = (
        Path(__file__).with_name(f"alertmanager-{status}.json").read_bytes() for status in ("firing", "resolved")
    )
    headers = {"content-type": "application/json", "user-agent": "Alertmanager/0.25.0"}
    path = f"{LBS}/web/backends/one/eject"
    fired = (await member.post(path, content=firing, headers=headers)).json()["backends"][0]
    assert (fired["wanted"], fired["ejected_reason"]) == ("ejected", "BackendErrors")
    resolved = (await member.post(path, content=resolving, headers=headers)).json()["backends"][0]
    assert (resolved["wanted"], resolved["ejected_until"]) == ("active", None)
    for body in ({"seconds": 0}, {"seconds": 86_401}, {"status": "maybe"}, {"alerts": "x"}, {"alerts": [1]}):
        assert (await member.post(path, json=body)).status_code == 422, body


async def test_one_webhook_for_all_backends(ground, member):
    """Each alert's label says whose it is; the same real bodies, and one with both and with a stranger's."""
    assert (await member.post(LBS, json={**WEB, "backends": [{"vm": "one"}, {"vm": "two"}]})).status_code == 201
    path = f"{LBS}/web/eject"
    firing, resolving = (
        Path(__file__).with_name(f"alertmanager-{status}.json").read_bytes() for status in ("firing", "resolved")
    )
    headers = {"content-type": "application/json"}

    def wanted(answer):
        assert answer.status_code == 200, answer.text
        return {one["target"]: (one["wanted"], one["ejected_reason"]) for one in answer.json()["backends"]}

    up = ("active", "")
    assert wanted(await member.post(path, content=firing, headers=headers)) == {
        "one": ("ejected", "BackendErrors"),
        "two": up,
    }
    assert wanted(await member.post(path, content=resolving, headers=headers)) == {"one": up, "two": up}
    nic_id = (await member.get(f"{LBS}/web")).json()["backends"][1]["machines"][0]["nic_id"]
    alerts = [
        {"status": "firing", "labels": {"alertname": "Slow", "backend": nic_id}},
        {"status": "resolved", "labels": {"alertname": "Errors", "backend": nic_id}},
        {"status": "firing", "labels": {"backend": "somebody-elses"}},
        {"status": "firing", "labels": {}},
    ]
    answer = await member.post(path, json={"seconds": 60, "alerts": alerts})
    assert wanted(answer) == {"one": up, "two": ("ejected", "Slow")}
    nobody = await member.post(path, json={"alerts": alerts[2:]})
    assert (nobody.status_code, nobody.json()["code"]) == (404, "loadbalancer.backend_not_found")
    for body in ({}, {"alerts": []}, {"alerts": [{"status": "maybe", "labels": {}}]}, {"alerts": alerts, "seconds": 0}):
        assert (await member.post(path, json=body)).status_code == 422, body


@pytest.mark.parametrize(
    ("change", "status", "code", "pointer"),
    [
        ({"listeners": []}, 422, "request.invalid", "/listeners"),
        ({"listeners": [{"port": 0}]}, 422, "request.invalid", "/listeners/0/port"),
        (
            {"listeners": [{"port": 80}, {"port": 80, "target_port": 81}]},
            409,
            "loadbalancer.listener_taken",
            "/listeners/1/port",
        ),
        ({"listeners": [{"port": 80, "protocol": "sctp"}]}, 422, "request.invalid", "/listeners/0/protocol"),
        ({"backends": [{"vm": "one", "weight": 0}]}, 422, "request.invalid", "/backends/0/weight"),
        ({"backends": [{"vm": "one", "weight": 300}]}, 422, "request.invalid", "/backends/0/weight"),
        ({"backends": [{"vm": "one", "weight": "2"}]}, 422, "request.invalid", "/backends/0/weight"),
        ({"backends": [{}]}, 422, "request.invalid", "/backends/0/vm"),
        ({"backends": [{"vm": "one", "address": "10.192.0.2"}]}, 422, "request.invalid", "/backends/0/vm"),
        ({"backends": [{"vm": "one"}, {"vm": "one"}]}, 409, "loadbalancer.backend_taken", "/backends/1"),
        ({"backends": [{"vm": "theirs"}]}, 422, "loadbalancer.backend_unknown", "/backends/0/vm"),
        ({"backends": [{"address": "8.8.8.8"}]}, 422, "loadbalancer.backend_unknown", "/backends/0/address"),
        ({"backends": [{"address": "nonsense"}]}, 422, "loadbalancer.backend_unknown", "/backends/0/address"),
        ({"backends": [{"endpoint": "chat"}]}, 422, "loadbalancer.backend_unknown", "/backends/0/endpoint"),
        ({"addresses": ["nothing"]}, 422, "loadbalancer.address_unknown", "/addresses/0"),
        ({"addresses": ["front", "front"]}, 409, "loadbalancer.address_in_use", "/addresses/1"),
        ({"network": None}, 422, "loadbalancer.no_address", "/addresses"),
        ({"network": "far"}, 422, "loadbalancer.network_unknown", "/network"),
        ({"algorithm": "luck"}, 422, "request.invalid", "/algorithm"),
        ({"profile": "forever"}, 422, "request.invalid", "/profile"),
        ({"probe": {"kind": "http", "path": "no"}}, 422, "request.invalid", "/probe/path"),
        ({"probe": {"interval_ms": 100, "timeout_ms": 200}}, 422, "request.invalid", "/probe/timeout_ms"),
        (
            {"probe": {"expected_status_first": 300, "expected_status_last": 200}},
            422,
            "request.invalid",
            "/probe/expected_status_last",
        ),
        ({"circuit": {"errors": 0}}, 422, "request.invalid", "/circuit/errors"),
        ({"edges": 17}, 422, "request.invalid", "/edges"),
    ],
)
async def test_refused(ground, member, stranger, change, status, code, pointer):
    assert (await stranger.post("/v1/projects/theirs/networks", json={"name": "far"})).status_code == 201
    answer = await member.post(LBS, json={**WEB, **change})
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert pointer in [item["pointer"] for item in answer.json()["errors"]]
    assert (await member.get(LBS)).json()["items"] == []


async def test_backends_that_are_not_there(ground, member):
    assert (await member.post(LBS, json=WEB)).status_code == 201
    answers = [await member.post(f"{LBS}/web/backends/one/{action}") for action in ("drain", "activate", "remove")]
    answers.append(await member.patch(f"{LBS}/web/backends/one", json={"weight": 2}))
    for answer in answers:
        assert (answer.status_code, answer.json()["code"]) == (404, "loadbalancer.backend_not_found")
    assert (await member.post(f"{LBS}/web/backends", json={"vm": "one"})).status_code == 200
    weighed = await member.patch(f"{LBS}/web/backends/one", json={"weight": 7})
    assert (weighed.json()["backends"][0]["weight"], weighed.json()["generation"]) == (7, 3)
    for weight in (0, 300, "2", None):
        answer = await member.patch(f"{LBS}/web/backends/one", json={"weight": weight})
        assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/weight")
    again = await member.post(f"{LBS}/web/backends", json={"vm": "one"})
    assert (again.status_code, again.json()["code"]) == (409, "loadbalancer.backend_taken")
    assert (await member.post(LBS, json=WEB)).json()["code"] == "loadbalancer.name_taken"
