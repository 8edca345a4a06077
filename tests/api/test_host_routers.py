"""Routers of a host through the API: what may be asked for, and that passwords are neither shown nor plain at rest."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from controlplane.models.host import Host
from tests.api.fleet import add_host

PASSWORD = "planted-5e1c"
BGP = {"local_as": 65010, "peers": [{"address": "192.0.2.1", "peer_as": 65001, "password": PASSWORD}]}


async def test_routers_are_kept_without_their_passwords(operator, member, api):
    await add_host(api.database.sessionmaker, "edge-1")
    assert (await member.patch("/v1/hosts/edge-1", json={"bgp": BGP})).status_code in (403, 404)
    changed = await operator.patch("/v1/hosts/edge-1", json={"bgp": BGP, "location": "rack1", "labels": {"a": "b"}})
    assert changed.status_code == 200, changed.text
    shown = changed.json()
    assert (shown["location"], shown["labels"], shown["generation"]) == ("rack1", {"a": "b"}, 2)
    peer = {"address": "192.0.2.1", "peer_as": 65001, "has_password": True}
    assert shown["wanted"]["bgp"] == {"local_as": 65010, "port": 179, "peers": [peer], "revision": 1}
    assert PASSWORD not in (await operator.get("/v1/hosts/edge-1")).text
    async with api.database.sessionmaker() as session:
        host = (await session.scalars(select(Host))).one()
    assert host.bgp_passwords_sealed
    assert PASSWORD.encode() not in host.bgp_passwords_sealed
    again = await operator.patch("/v1/hosts/edge-1", json={"bgp": BGP})
    assert again.json()["wanted"]["bgp"]["revision"] == 2, "another password alone is told, too"
    gone = await operator.patch("/v1/hosts/edge-1", json={"bgp": None})
    assert (gone.json()["wanted"]["bgp"], gone.json()["location"]) == (None, "rack1")


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"local_as": 0}, "/bgp/local_as"),
        ({"local_as": 4_294_967_295}, "/bgp/local_as"),
        ({"port": 0}, "/bgp/port"),
        ({"peers": []}, "/bgp/peers"),
        ({"peers": [{"address": "router", "peer_as": 1}]}, "/bgp/peers/0/address"),
        ({"peers": [{"address": "192.0.2.1", "peer_as": "1"}]}, "/bgp/peers/0/peer_as"),
        ({"peers": [{"address": "192.0.2.1", "peer_as": 1, "password": 'a"b'}]}, "/bgp/peers/0/password"),
        ({"peers": [{"address": "192.0.2.1", "peer_as": 1, "password": "a b"}]}, "/bgp/peers/0/password"),
        ({"peers": [{"address": "192.0.2.1", "peer_as": 1, "password": "x" * 81}]}, "/bgp/peers/0/password"),
        ({"peers": [BGP["peers"][0], BGP["peers"][0]]}, "/bgp/peers"),
    ],
)
async def test_refused(operator, api, change, pointer):
    await add_host(api.database.sessionmaker, "edge-1")
    answer = await operator.patch("/v1/hosts/edge-1", json={"bgp": {**BGP, **change}})
    assert (answer.status_code, answer.json()["code"]) == (422, "request.invalid"), answer.text
    assert pointer in [item["pointer"] for item in answer.json()["errors"]]
    assert PASSWORD not in answer.text
    assert (await operator.get("/v1/hosts/edge-1")).json()["wanted"]["bgp"] is None
