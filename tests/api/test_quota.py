"""Quotas: what a project may have, held also when many ask at once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.api.fleet import add_host, lay_ground

MIB = 1 << 20
VM = {"image": "debian", "network": "net", "vcpus": 2, "memory_bytes": 128 * MIB}
VMS = "/v1/projects/ours/vms"


@pytest.fixture
async def ground(api):
    await lay_ground(api.database.sessionmaker)
    await add_host(api.database.sessionmaker, cpus=64, memory_bytes=64 << 30)


async def limit(operator, **quota: int) -> None:
    answer = await operator.patch("/v1/projects/ours", json={"quota": quota})
    assert answer.status_code == 200, answer.text
    assert answer.json()["quota"] == quota


async def test_more_than_the_quota_is_refused_and_keeps_nothing(operator, member, ground):
    await limit(operator, vcpus=3)
    assert (await member.post(VMS, json=VM | {"name": "one"})).status_code == 201
    refused = await member.post(VMS, json=VM | {"name": "two"})
    assert (refused.status_code, refused.json()["code"]) == (403, "quota.exceeded")
    assert "vcpus: 2 of 3 used, 2 more asked for" in refused.json()["detail"]
    assert (await member.get(f"{VMS}/two")).status_code == 404
    host = (await operator.get("/v1/hosts")).json()["items"][0]
    assert host["observed"]["reserved"]["vcpus"] == 2
    assert (await member.post(VMS, json=VM | {"name": "two", "vcpus": 1})).status_code == 201


@pytest.mark.parametrize("quota", [{"vms": 0}, {"memory_bytes": 127 * MIB}, {"volumes": 0}, {"disk_bytes": 1}])
async def test_each_resource_has_its_own(operator, member, ground, quota):
    await limit(operator, **quota)
    refused = await member.post(VMS, json=VM | {"name": "one"})
    assert (refused.status_code, refused.json()["code"]) == (403, "quota.exceeded")
    assert next(iter(quota)) in refused.json()["detail"]


async def test_a_resize_is_asked_too_but_never_downwards(operator, member, ground):
    assert (await member.post(VMS, json=VM | {"name": "one"})).status_code == 201
    await limit(operator, vcpus=1)
    grown = await member.post(f"{VMS}/one/resize", json={"vcpus": 3})
    assert (grown.status_code, grown.json()["code"]) == (403, "quota.exceeded")
    assert (await member.post(f"{VMS}/one/resize", json={"vcpus": 1})).status_code < 300


async def test_operators_alone_set_it(operator, member, ground):
    refused = await member.patch("/v1/projects/ours", json={"quota": {"vms": 1000}})
    assert refused.status_code == 403
    wrong = await operator.patch("/v1/projects/ours", json={"quota": {"unicorns": 1}})
    assert wrong.status_code == 422
    await limit(operator, vms=0)
    await limit(operator)
    assert (await member.post(VMS, json=VM | {"name": "one"})).status_code == 201


async def test_many_at_once_never_have_more(operator, member, ground):
    await limit(operator, vms=5)
    answers = await asyncio.gather(*(member.post(VMS, json=VM | {"name": f"vm-{index}"}) for index in range(20)))
    assert Counter(answer.status_code for answer in answers) == {201: 5, 403: 15}, [answer.text for answer in answers][:2]
    assert len((await member.get(VMS)).json()["items"]) == 5
