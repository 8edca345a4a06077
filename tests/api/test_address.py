"""Pools and reserved addresses through the API."""

from __future__ import annotations

import asyncio
from ipaddress import ip_network

import pytest

from controlplane.models.address import Pool
from controlplane.resources.address.service import lowest_free
from tests.api.fleet import add_host, lay_ground

ADDRESSES = "/v1/projects/ours/addresses"
UPLINK = {"name": "uplink", "cidr": "203.0.113.0/29", "excluded": ["203.0.113.1"]}


@pytest.mark.parametrize(
    ("body", "status", "code", "pointer"),
    [
        ({"cidr": "203.0.113.1/24"}, 422, "request.invalid", "/cidr"),
        ({"cidr": "hello"}, 422, "request.invalid", "/cidr"),
        ({"cidr": "224.0.0.0/16"}, 422, "request.invalid", "/cidr"),
        ({"cidr": "0.0.0.0/0"}, 422, "request.invalid", "/cidr"),
        ({"excluded": ["192.0.2.1"]}, 422, "request.invalid", "/excluded"),
        ({"announce": "pigeon"}, 422, "request.invalid", "/announce"),
        ({"cidr": "203.0.113.0/24"}, 409, "pool.cidr_taken", None),
        ({"cidr": "10.192.0.0/24"}, 409, "pool.cidr_taken", "/cidr"),
        ({"name": "uplink", "cidr": "198.51.100.0/24"}, 409, "pool.name_taken", None),
    ],
)
async def test_pools_that_cannot_be(operator, member, body, status, code, pointer):
    assert (await operator.post("/v1/pools", json=UPLINK)).status_code == 201
    assert (await member.post("/v1/projects/ours/networks", json={"name": "net"})).status_code == 201
    answer = await operator.post("/v1/pools", json={"name": "other", "cidr": "198.51.100.0/24", **body})
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert pointer is None or pointer in [item["pointer"] for item in answer.json()["errors"]]


async def test_pools_are_the_operators_and_everybody_sees_them(operator, member):
    assert (await member.post("/v1/pools", json=UPLINK)).status_code == 403
    made = await operator.post("/v1/pools", json=UPLINK)
    assert (made.status_code, made.json()["family"]) == (201, "ipv4")
    assert [pool["name"] for pool in (await member.get("/v1/pools")).json()["items"]] == ["uplink"]
    assert (await member.post(ADDRESSES, json={"name": "front"})).json()["address"] == "203.0.113.2"
    used = await operator.delete("/v1/pools/uplink")
    assert (used.status_code, used.json()["code"]) == (409, "pool.in_use")
    outside = await operator.patch("/v1/pools/uplink", json={"excluded": ["203.0.113.2", "192.0.2.1"]})
    assert (outside.status_code, outside.json()["code"]) == (422, "pool.exclusion_outside")
    assert outside.json()["errors"][0]["pointer"] == "/excluded/1"
    assert (await operator.patch("/v1/pools/uplink", json={"excluded": ["203.0.113.0/30"]})).json()["generation"] == 2
    assert (await member.post(ADDRESSES, json={"name": "back"})).json()["address"] == "203.0.113.4"
    for name in ("front", "back"):
        assert (await member.delete(f"{ADDRESSES}/{name}")).status_code == 204
    assert (await operator.delete("/v1/pools/uplink")).status_code == 204


async def test_reserving(operator, member, stranger):
    none = await member.post(ADDRESSES, json={"name": "front"})
    assert (none.status_code, none.json()["code"]) == (422, "address.pool_unknown")
    assert (await operator.post("/v1/pools", json=UPLINK)).status_code == 201
    assert (await operator.post("/v1/pools", json={"name": "six", "cidr": "2001:db8:7::/64"})).status_code == 201
    for body, status, code in (
        ({"address": "203.0.113.9"}, 422, "address.outside_pool"),
        ({"address": "203.0.113.1"}, 422, "address.outside_pool"),
        ({"address": "203.0.113.7"}, 422, "address.outside_pool"),
        ({"address": "203.0.113.4", "pool": "six"}, 422, "address.pool_unknown"),
        ({"address": "203.0.113.4", "family": "ipv6"}, 422, "request.invalid"),
        ({"address": "203.0.113.4/32"}, 422, "request.invalid"),
        ({"family": "ipv5"}, 422, "request.invalid"),
        ({"pool": "nothing"}, 422, "address.pool_unknown"),
    ):
        answer = await member.post(ADDRESSES, json={"name": "front", **body})
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert (await member.post(ADDRESSES, json={"name": "a", "address": "203.0.113.4"})).status_code == 201
    theirs = "/v1/projects/theirs/addresses"
    taken = await stranger.post(theirs, json={"name": "b", "address": "203.0.113.4"})
    assert (taken.status_code, taken.json()["code"]) == (409, "address.taken")
    assert (await stranger.get(f"{theirs}/a")).status_code == 404
    assert (await member.post(ADDRESSES, json={"name": "a"})).json()["code"] == "address.name_taken"
    assert (await member.post(ADDRESSES, json={"name": "six", "family": "ipv6"})).json()["address"] == "2001:db8:7::1"
    answers = await asyncio.gather(*(stranger.post(theirs, json={"name": f"n{n}"}) for n in range(6)))
    assert sorted(answer.status_code for answer in answers) == [201] * 4 + [507] * 2
    assert len({answer.json()["address"] for answer in answers if answer.is_success}) == 4
    assert {answer.json()["code"] for answer in answers if not answer.is_success} == {"address.pool_exhausted"}


async def test_attaching_and_moving(operator, member, api):
    await lay_ground(api.database.sessionmaker)
    await add_host(api.database.sessionmaker)
    assert (await operator.post("/v1/pools", json=UPLINK)).status_code == 201
    for name in ("one", "two"):
        body = {"name": name, "image": "debian", "network": "net"}
        assert (await member.post("/v1/projects/ours/vms", json=body)).status_code == 201
    assert (await member.post(ADDRESSES, json={"name": "front"})).status_code == 201
    assert (await member.post(ADDRESSES, json={"name": "back"})).status_code == 201
    path = f"{ADDRESSES}/front/attach"
    assert (await member.post(path, json={"vm": "nobody"})).json()["code"] == "address.target_unknown"
    assert (await member.post(path, json={})).json()["code"] == "request.invalid"
    first = await member.post(path, json={"vm": "one"})
    assert (first.json()["target"], first.json()["generation"]) == ("one", 2)
    refused = await member.post(path, json={"vm": "two"})
    assert (refused.status_code, refused.json()["code"]) == (409, "address.attached")
    double = await member.post(f"{ADDRESSES}/back/attach", json={"vm": "one"})
    assert (double.status_code, double.json()["code"]) == (409, "address.family_taken")
    assert (await member.post(path, json={"vm": "two", "move": True})).json()["target"] == "two"
    held = await member.delete(f"{ADDRESSES}/front")
    assert (held.status_code, held.json()["code"]) == (409, "address.in_use")
    assert (await member.post(f"{ADDRESSES}/front/detach")).json()["vm_id"] is None
    assert (await member.delete(f"{ADDRESSES}/front")).status_code == 204


def test_a_large_exclusion_costs_nothing():
    pool = Pool(cidr=ip_network("2001:db8::/64"), excluded=["2001:db8::/65"])
    assert str(lowest_free(pool, [])) == "2001:db8:0:0:8000::"
    assert str(lowest_free(Pool(cidr=ip_network("203.0.113.8/32"), excluded=[]), [])) == "203.0.113.8"
    assert lowest_free(Pool(cidr=ip_network("203.0.113.8/31"), excluded=["203.0.113.8/31"]), []) is None
