"""Networks through the API: prefixes are unique in the deployment and come from the operator's pool."""

from __future__ import annotations

import asyncio
from ipaddress import IPv6Network

import pytest
from sqlalchemy import update

from controlplane.models.host import Host
from tests.api.fleet import add_host, lay_ground

NETWORKS = "/v1/projects/ours/networks"


async def test_life_of_a_network(member):
    made = await member.post(NETWORKS, json={"name": "front"})
    assert made.status_code == 201, made.text
    body = made.json()
    assert body["ipv4_cidr"] == "10.192.0.0/24"
    assert IPv6Network(body["ipv6_cidr"]).subnet_of(IPv6Network("fd00::/8"))
    assert (body["encryption"], body["mtu_bytes"]) == ("wireguard", 1420)
    assert (await member.post(NETWORKS, json={"name": "back"})).json()["ipv4_cidr"] == "10.192.1.0/24"
    changed = await member.patch(f"{NETWORKS}/front", json={"labels": {"a": "b"}})
    assert (changed.json()["labels"], changed.json()["generation"]) == ({"a": "b"}, 2)
    assert (await member.delete(f"{NETWORKS}/front")).status_code == 204
    assert (await member.delete(f"{NETWORKS}/front")).status_code == 204
    assert (await member.post(NETWORKS, json={"name": "again"})).json()["ipv4_cidr"] == "10.192.0.0/24"


@pytest.mark.parametrize(
    ("body", "status", "code", "pointer"),
    [
        ({"name": "Front"}, 422, "request.invalid", "/name"),
        ({}, 422, "request.invalid", "/name"),
        ({"name": "x", "mtu": 1}, 422, "request.invalid", "/mtu"),
        ({"name": "x", "ipv4_cidr": "10.192.0.1/24"}, 422, "request.invalid", "/ipv4_cidr"),
        ({"name": "x", "ipv4_cidr": "hello"}, 422, "request.invalid", "/ipv4_cidr"),
        ({"name": "x", "ipv4_cidr": "fd00::/64"}, 422, "request.invalid", "/ipv4_cidr"),
        ({"name": "x", "ipv4_cidr": "8.8.8.0/24"}, 422, "request.invalid", "/ipv4_cidr"),
        ({"name": "x", "ipv4_cidr": "10.192.0.0/31"}, 422, "request.invalid", "/ipv4_cidr"),
        ({"name": "x", "ipv4_cidr": "192.168.0.0/24"}, 422, "network.cidr_outside_pool", "/ipv4_cidr"),
        ({"name": "x", "encryption": "rot13"}, 422, "request.invalid", "/encryption"),
    ],
)
async def test_refused(member, body, status, code, pointer):
    answer = await member.post(NETWORKS, json=body)
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert pointer in [item["pointer"] for item in answer.json()["errors"]]
    assert (await member.get(NETWORKS)).json()["items"] == []


async def test_prefixes_never_overlap_not_even_between_projects(member, stranger):
    assert (await member.post(NETWORKS, json={"name": "x", "ipv4_cidr": "10.200.0.0/16"})).status_code == 201
    taken = await stranger.post("/v1/projects/theirs/networks", json={"name": "y", "ipv4_cidr": "10.200.7.0/24"})
    assert (taken.status_code, taken.json()["code"]) == (409, "network.cidr_taken")
    again = await member.post(NETWORKS, json={"name": "x"})
    assert (again.status_code, again.json()["code"]) == (409, "network.name_taken")


async def test_many_at_once_get_different_prefixes(member):
    answers = await asyncio.gather(*(member.post(NETWORKS, json={"name": f"n{n}"}) for n in range(8)))
    assert [answer.status_code for answer in answers] == [201] * 8
    assert len({answer.json()["ipv4_cidr"] for answer in answers}) == 8
    assert len({answer.json()["ipv6_cidr"] for answer in answers}) == 8


async def test_a_network_in_use_stays(member, api):
    await lay_ground(api.database.sessionmaker)
    await add_host(api.database.sessionmaker)
    made = await member.post("/v1/projects/ours/vms", json={"name": "web", "image": "debian", "network": "net"})
    assert made.status_code == 201, made.text
    refused = await member.delete(f"{NETWORKS}/net")
    assert (refused.status_code, refused.json()["code"]) == (409, "network.in_use")


async def test_a_small_network_fills_up(member, operator, api):
    await lay_ground(api.database.sessionmaker)
    await add_host(api.database.sessionmaker, cpus=32)
    assert (await member.post(NETWORKS, json={"name": "tiny", "ipv4_cidr": "10.250.0.0/29"})).status_code == 201
    vms = [{"name": f"v{n}", "image": "debian", "network": "tiny", "memory_bytes": 128 << 20} for n in range(6)]
    answers = [await member.post("/v1/projects/ours/vms", json=body) for body in vms]
    assert [answer.status_code for answer in answers] == [201] * 5 + [507]
    assert answers[-1].json()["code"] == "network.full"
    assert (await operator.post("/v1/placements/explain", json={})).json()["verdicts"][0]["free_vcpus"] == 27


async def test_encryption_is_refused_where_no_host_can_and_none_where_no_network_is_trusted(member, api):
    await lay_ground(api.database.sessionmaker)
    for name in ("a", "b"):
        await add_host(api.database.sessionmaker, name)
    refused = await member.post(NETWORKS, json={"name": "plain", "encryption": "none"})
    assert (refused.status_code, refused.json()["code"]) == (409, "network.data_untrusted")
    assert refused.json()["errors"][0]["detail"] == "a, b: no data interface was declared"
    async with api.database.sessionmaker.begin() as session:
        await session.execute(update(Host).where(Host.name == "a").values(tunnel_driver="", data_interface="eth1"))

    # one of two hosts can: the network is made, and its machines go there
    assert (await member.post(NETWORKS, json={"name": "one"})).status_code == 201
    for name in ("v1", "v2"):
        made = await member.post("/v1/projects/ours/vms", json={"name": name, "image": "debian", "network": "one", "vcpus": 2})
        assert made.status_code == 201, made.text
    full = await member.post("/v1/projects/ours/vms", json={"name": "v3", "image": "debian", "network": "one"})
    assert (full.status_code, full.json()["code"]) == (507, "vm.no_capacity")
    assert "without WireGuard" in full.json()["detail"]

    async with api.database.sessionmaker.begin() as session:
        await session.execute(update(Host).values(tunnel_driver="", data_interface="eth1", underlay_mtu_bytes=1400))
    refused = await member.post(NETWORKS, json={"name": "x"})
    assert (refused.status_code, refused.json()["code"]) == (409, "network.encryption_unsupported")
    plain = await member.post(NETWORKS, json={"name": "x", "encryption": "none"})
    assert (plain.status_code, plain.json()["mtu_bytes"]) == (201, 1400)


async def test_the_hosts_own_addresses_are_no_networks(member):
    assert (await member.post(NETWORKS, json={"name": "x", "ipv4_cidr": "10.255.255.0/24"})).status_code == 409
