"""Firewalls through the API: what a rule may be, what it may refer to, and that nothing is half kept."""

from __future__ import annotations

import asyncio

import pytest

from tests.api.fleet import add_host, lay_ground

FIREWALLS = "/v1/projects/ours/firewalls"
NETWORKS = "/v1/projects/ours/networks"
SSH = {"protocol": "tcp", "port_first": 22, "cidrs": ["0.0.0.0/0", "::/0"]}


async def test_life_of_a_firewall(member):
    assert (await member.post(NETWORKS, json={"name": "front", "firewall": None})).status_code == 201
    made = await member.post(FIREWALLS, json={"name": "web", "rules": [SSH], "networks": ["front"]})
    assert made.status_code == 201, made.text
    body = made.json()
    assert [item["name"] for item in body["attached_to"]] == ["front"]
    (rule,) = body["rules"]
    assert (rule["direction"], rule["action"], rule["port_last"], rule["far_end"]) == ("ingress", "allow", 22, "cidrs")

    allowed = await member.post(f"{FIREWALLS}/web/allow", json={"protocol": "any", "firewall": "web"})
    assert allowed.json()["rules"][1]["firewall_id"] == body["id"]
    assert allowed.headers["etag"] == '"2"'
    denied = await member.post(
        f"{FIREWALLS}/web/deny",
        json={"direction": "egress", "protocol": "udp", "port_first": 53, "port_last": 54, "network": "front"},
    )
    assert [one["action"] for one in denied.json()["rules"]] == ["allow", "allow", "deny"]
    revoked = await member.post(f"{FIREWALLS}/web/revoke", json={"rule": rule["id"]})
    assert [one["protocol"] for one in revoked.json()["rules"]] == ["any", "udp"]
    assert revoked.headers["x-operation-id"].startswith("op_")
    changed = await member.patch(f"{FIREWALLS}/web", json={"rules": [SSH], "labels": {"a": "b"}}, headers={"if-match": '"4"'})
    assert (len(changed.json()["rules"]), changed.json()["generation"]) == (1, 5)

    refused = await member.delete(f"{FIREWALLS}/web")
    assert (refused.status_code, refused.json()["code"]) == (409, "firewall.in_use")
    assert (await member.post(f"{FIREWALLS}/web/detach", json={"network": "front"})).json()["attached_to"] == []
    assert (await member.delete(f"{FIREWALLS}/web")).status_code == 204
    assert (await member.get(f"{FIREWALLS}/web")).json()["code"] == "firewall.not_found"


@pytest.mark.parametrize(
    ("rule", "pointer"),
    [
        ({**SSH, "cidrs": ["10.0.0.1/8"]}, "/rules/0/cidrs/0"),
        ({**SSH, "cidrs": ["10.0.0.0/8", "2001:db8::1/32"]}, "/rules/0/cidrs/1"),
        ({**SSH, "cidrs": ["everywhere"]}, "/rules/0/cidrs/0"),
        ({**SSH, "cidrs": ["fe80::1%eth0"]}, "/rules/0/cidrs/0"),
        ({**SSH, "cidrs": []}, "/rules/0/cidrs"),
        ({**SSH, "cidrs": ["10.0.0.0/8", "10.1.0.0/16"]}, "/rules/0/cidrs"),
        ({**SSH, "cidrs": ["::/0", "2001:db8::/32"]}, "/rules/0/cidrs"),
        ({**SSH, "cidrs": [f"10.{n}.0.0/16" for n in range(101)]}, "/rules/0/cidrs"),
        ({**SSH, "port_first": 80, "port_last": 22}, "/rules/0/port_last"),
        ({**SSH, "port_first": 0}, "/rules/0/port_first"),
        ({**SSH, "port_last": 65536}, "/rules/0/port_last"),
        ({**SSH, "port_first": "22"}, "/rules/0/port_first"),
        ({"protocol": "tcp", "port_last": 22, "cidrs": ["::/0"]}, "/rules/0/port_first"),
        ({"protocol": "icmp", "port_first": 22, "cidrs": ["::/0"]}, "/rules/0/port_first"),
        ({"protocol": "sctp", "cidrs": ["::/0"]}, "/rules/0/protocol"),
        ({"protocol": "any"}, "/rules/0/cidrs"),
        ({**SSH, "network": "net"}, "/rules/0/cidrs"),
        ({**SSH, "direction": "sideways"}, "/rules/0/direction"),
        ({**SSH, "action": "log"}, "/rules/0/action"),
        ({**SSH, "comment": "x"}, "/rules/0/comment"),
    ],
)
async def test_a_wrong_rule_is_pointed_at(member, rule, pointer):
    answer = await member.post(FIREWALLS, json={"name": "web", "rules": [rule]})
    assert (answer.status_code, answer.json()["code"]) == (422, "request.invalid"), answer.text
    assert pointer in [item["pointer"] for item in answer.json()["errors"]]
    assert (await member.get(FIREWALLS)).json()["items"] == []


async def test_what_a_rule_names_must_be_in_the_project(member, stranger):
    theirs = "/v1/projects/theirs"
    assert (await stranger.post(f"{theirs}/networks", json={"name": "far"})).status_code == 201
    other = (await stranger.post(f"{theirs}/firewalls", json={"name": "other"})).json()["id"]
    for far_end, code in ((("network", "far"), "firewall.network_unknown"), (("firewall", other), "firewall.peer_unknown")):
        rules = [SSH, {"protocol": "any", far_end[0]: far_end[1]}]
        answer = await member.post(FIREWALLS, json={"name": "web", "rules": rules})
        assert (answer.status_code, answer.json()["code"]) == (422, code)
        assert answer.json()["errors"][0]["pointer"] == f"/rules/1/{far_end[0]}"
    answer = await member.post(FIREWALLS, json={"name": "web", "networks": ["far"]})
    assert (answer.json()["code"], answer.json()["errors"][0]["pointer"]) == ("firewall.network_unknown", "/networks/0")
    answer = await member.post(FIREWALLS, json={"name": "web", "vms": ["nobody"]})
    assert (answer.json()["code"], answer.json()["errors"][0]["pointer"]) == ("firewall.vm_unknown", "/vms/0")
    assert (await member.get(f"{FIREWALLS}/{other}")).status_code == 404
    assert (await member.post(f"{FIREWALLS}/{other}/allow", json=SSH)).status_code == 404
    assert (await member.get(FIREWALLS)).json()["items"] == []


async def test_the_same_rule_twice(member):
    answer = await member.post(
        FIREWALLS, json={"name": "web", "rules": [SSH, {**SSH, "port_last": 22, "cidrs": ["::/0", "0.0.0.0/0"]}]}
    )
    assert (answer.status_code, answer.json()["code"]) == (409, "firewall.rule_duplicate")
    assert answer.json()["errors"][0]["pointer"] == "/rules/1"
    assert (await member.post(FIREWALLS, json={"name": "web", "rules": [SSH]})).status_code == 201
    assert (await member.post(f"{FIREWALLS}/web/allow", json=SSH)).json()["code"] == "firewall.rule_duplicate"
    opposite = await member.post(f"{FIREWALLS}/web/deny", json=SSH)
    assert (opposite.status_code, opposite.json()["code"]) == (409, "firewall.rule_contradicts")
    (rule,) = (await member.get(f"{FIREWALLS}/web")).json()["rules"]
    assert opposite.json()["context"] == {"rule": rule["id"]}
    assert (await member.post(FIREWALLS, json={"name": "web"})).json()["code"] == "firewall.name_taken"


async def test_an_allowance_that_could_never_act(member):
    """A denial wins whatever the order; what is denied already is not allowed by halves."""
    front = {"protocol": "any", "network": "front"}
    assert (await member.post(NETWORKS, json={"name": "front", "firewall": None})).status_code == 201
    deny = {"protocol": "any", "action": "deny", "cidrs": ["10.0.0.0/8", "2001:db8::/32"]}
    for idle in (
        {**SSH, "cidrs": ["10.1.0.0/16"]},
        {"protocol": "icmp", "cidrs": ["10.0.0.1/32", "2001:db8:1::/48"]},
    ):
        for rules, at in (([deny, SSH, idle], 2), ([idle, SSH, deny], 0)):
            answer = await member.post(FIREWALLS, json={"name": "web", "rules": rules})
            assert (answer.status_code, answer.json()["code"]) == (409, "firewall.rule_contradicts"), idle
            assert answer.json()["errors"][0]["pointer"] == f"/rules/{at}"
    for fine in ({**SSH, "direction": "egress"}, {**SSH, "cidrs": ["10.0.0.0/7"]}, {**front, "action": "allow"}):
        assert (await member.post(FIREWALLS, json={"name": "web", "rules": [deny, fine]})).status_code == 201
        assert (await member.delete(f"{FIREWALLS}/web")).status_code == 204
    ranges = {"protocol": "tcp", "port_first": 80, "port_last": 90, "cidrs": ["::/0"], "action": "deny"}
    assert (await member.post(FIREWALLS, json={"name": "web", "rules": [ranges]})).status_code == 201
    path = f"{FIREWALLS}/web"
    inside = {"protocol": "tcp", "port_first": 81, "cidrs": ["2001:db8::/32"]}
    assert (await member.post(f"{path}/allow", json=inside)).json()["code"] == "firewall.rule_contradicts"
    for first, last in ((90, 91), (79, 80)):
        over = {**inside, "port_first": first, "port_last": last}
        assert (await member.post(f"{path}/allow", json=over)).status_code == 200
    assert (await member.post(f"{path}/deny", json={**front})).status_code == 200
    assert (await member.post(f"{path}/allow", json={**front, "protocol": "udp"})).status_code == 409
    # in need a wide denial goes over narrow allowances at once
    assert (await member.post(f"{path}/deny", json={"protocol": "any", "cidrs": ["2001:db8::/32"]})).status_code == 200


async def test_attached_twice_by_its_maker(member):
    assert (await member.post(NETWORKS, json={"name": "front", "firewall": None})).status_code == 201
    twice = await member.post(FIREWALLS, json={"name": "web", "networks": ["front", "front"]})
    assert (twice.status_code, twice.json()["code"]) == (409, "firewall.attached")
    assert (await member.get(FIREWALLS)).json()["items"] == []


async def test_there_is_an_end_to_rules_and_firewalls(member, api):
    rules = [{"protocol": "tcp", "port_first": port, "cidrs": ["::/0"]} for port in range(1, 102)]
    answer = await member.post(FIREWALLS, json={"name": "web", "rules": rules})
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, "/rules")
    assert (await member.post(FIREWALLS, json={"name": "web", "rules": rules[:100]})).status_code == 201
    full = await member.post(f"{FIREWALLS}/web/allow", json=rules[100])
    assert (full.status_code, full.json()["code"]) == (409, "firewall.too_many_rules")
    services = api.app.state.services
    limits = services.settings.limits.model_copy(update={"firewalls": 1})
    object.__setattr__(services, "settings", services.settings.model_copy(update={"limits": limits}))
    over = await member.post(FIREWALLS, json={"name": "another"})
    assert (over.status_code, over.json()["code"]) == (507, "firewall.limit_reached")


async def test_attaching(member, api):
    await lay_ground(api.database.sessionmaker)
    await add_host(api.database.sessionmaker)
    assert (await member.post("/v1/projects/ours/vms", json={"name": "web", "image": "debian", "network": "net"})).is_success
    assert (await member.post(FIREWALLS, json={"name": "more"})).status_code == 201
    on_vm = await member.post(f"{FIREWALLS}/more/attach", json={"vm": "web"})
    assert [(item["kind"], item["name"]) for item in on_vm.json()["attached_to"]] == [("vm", "web")]
    again = await member.post(f"{FIREWALLS}/more/attach", json={"vm": "web"})
    assert (again.status_code, again.json()["code"]) == (409, "firewall.attached")
    off = await member.post(f"{FIREWALLS}/more/detach", json={"network": "net"})
    assert (off.status_code, off.json()["code"]) == (409, "firewall.not_attached")
    for body, code in (({}, "request.invalid"), ({"vm": "web", "network": "net"}, "request.invalid")):
        assert (await member.post(f"{FIREWALLS}/more/attach", json=body)).json()["code"] == code
    assert (await member.post(f"{FIREWALLS}/more/attach", json={"vm": "x"})).json()["code"] == "firewall.vm_unknown"
    revoked = await member.post(f"{FIREWALLS}/more/revoke", json={"rule": "fwr_x"})
    assert (revoked.status_code, revoked.json()["code"]) == (422, "firewall.rule_unknown")


async def test_the_first_network_brings_the_default_firewall(member):
    assert (await member.post(NETWORKS, json={"name": "front"})).status_code == 201
    assert (await member.post(NETWORKS, json={"name": "back"})).status_code == 201
    (default,) = (await member.get(FIREWALLS)).json()["items"]
    assert [item["name"] for item in default["attached_to"]] == ["front", "back"]
    assert [(rule["protocol"], rule["port_first"], rule["far_end"]) for rule in default["rules"]] == [
        ("tcp", 22, "cidrs"),
        ("icmp", None, "cidrs"),
        ("any", None, "firewall"),
    ]
    unknown = await member.post(NETWORKS, json={"name": "side", "firewall": "nothing"})
    assert (unknown.status_code, unknown.json()["code"]) == (422, "network.firewall_unknown")
    assert (await member.delete(f"{NETWORKS}/front")).status_code == 204
    (default,) = (await member.get(FIREWALLS)).json()["items"]
    assert [item["name"] for item in default["attached_to"]] == ["back"]


async def test_first_networks_at_once_make_one_default(member):
    answers = await asyncio.gather(*(member.post(NETWORKS, json={"name": f"n{n}"}) for n in range(6)))
    assert [answer.status_code for answer in answers] == [201] * 6
    (default,) = (await member.get(FIREWALLS)).json()["items"]
    assert len(default["attached_to"]) == 6


async def test_a_network_or_firewall_that_a_rule_names_stays(member):
    assert (await member.post(NETWORKS, json={"name": "front", "firewall": None})).status_code == 201
    assert (await member.post(FIREWALLS, json={"name": "peer"})).status_code == 201
    rules = [{"protocol": "any", "network": "front"}, {"protocol": "any", "firewall": "peer"}]
    assert (await member.post(FIREWALLS, json={"name": "web", "rules": rules})).status_code == 201
    network = await member.delete(f"{NETWORKS}/front")
    assert (network.status_code, network.json()["code"]) == (409, "network.in_use")
    peer = await member.delete(f"{FIREWALLS}/peer")
    assert (peer.status_code, peer.json()["code"]) == (409, "firewall.in_use")
    assert (await member.delete(f"{FIREWALLS}/web")).status_code == 204
    assert (await member.delete(f"{FIREWALLS}/peer")).status_code == 204
