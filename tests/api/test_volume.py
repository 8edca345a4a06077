"""Volumes, snapshots and storage pools through the API: what is asked for, what is refused, and that nothing is half-made."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select, update

from controlplane.core.ids import Kind, new_id
from controlplane.models.host import Host
from controlplane.models.project_key import ProjectKey
from controlplane.models.run import Run
from controlplane.models.snapshot import Snapshot
from controlplane.models.storage_pool import StoragePool
from controlplane.models.vm import Vm
from controlplane.models.volume import Volume
from tests.api.fleet import GIB, add_host, lay_ground

VOLUMES = "/v1/projects/ours/volumes"
SNAPSHOTS = "/v1/projects/ours/snapshots"
VMS = "/v1/projects/ours/vms"
BODY = {"name": "data-1", "size_bytes": GIB}


async def add_pool(api, host_id: str, name: str = "primary", *, total: int = 100 * GIB, free: int = 100 * GIB) -> None:
    async with api.database.sessionmaker.begin() as session:
        values = {"total_bytes": total, "free_bytes": free, "seen_at": func.now()}
        session.add(StoragePool(id=new_id(Kind.STORAGE_POOL), host_id=host_id, name=name, **values))


@pytest.fixture(autouse=True)
async def host_id(api) -> str:
    await lay_ground(api.database.sessionmaker)
    host_id = await add_host(api.database.sessionmaker)
    await add_pool(api, host_id)
    return host_id


async def reserved(api) -> int:
    async with api.database.sessionmaker() as session:
        return int(await session.scalar(select(func.sum(StoragePool.reserved_bytes))) or 0)


async def count(api, *models) -> int:
    async with api.database.sessionmaker() as session:
        return sum([await session.scalar(select(func.count()).select_from(model)) for model in models])


async def make_ready(api, name: str) -> None:
    """What the program writes when the host has made the volume, or taken the snapshot."""
    async with api.database.sessionmaker.begin() as session:
        await session.execute(
            update(Volume).where(Volume.name == name).values(state="available", ready_at=func.now(), observed_generation=1)
        )
        taken = {"state": "available", "taken_at": func.now(), "consistency": "crash"}
        await session.execute(update(Snapshot).where(Snapshot.name == name).values(**taken))


async def test_one_request_takes_room_and_starts(member, api):
    made = await member.post(VOLUMES, json=BODY | {"limits": {"iops": 500}, "queue_size": 256, "retention_hours": 2})
    assert made.status_code == 201, made.text
    body = made.json()
    assert (body["status"], body["pool"], body["unlock"], body["is_root"]) == ("creating", "primary", "host", False)
    assert body["wanted"]["limits"]["iops"] == 500
    assert body["wanted"]["queue_size"] == 256
    assert await reserved(api) == GIB
    assert (await member.get(f"{VOLUMES}/data-1")).json()["id"] == body["id"]
    assert [item["name"] for item in (await member.get(VOLUMES)).json()["items"]] == ["data-1"]
    taken = await member.post(VOLUMES, json=BODY)
    assert (taken.status_code, taken.json()["code"]) == (409, "volume.name_taken")
    assert await reserved(api) == GIB


@pytest.mark.parametrize(
    ("changes", "status", "code", "pointer"),
    [
        ({"size_bytes": 0}, 422, "request.invalid", "/size_bytes"),
        ({"size_bytes": GIB + 1}, 422, "request.invalid", "/size_bytes"),
        ({"size_bytes": 1 << 50}, 422, "request.invalid", "/size_bytes"),
        ({"size_bytes": None}, 422, "request.invalid", "/size_bytes"),
        ({"image": "debian", "snapshot": "s"}, 422, "request.invalid", "/snapshot"),
        ({"image": "nothing"}, 422, "volume.image_unknown", "/image"),
        ({"image": "debian", "size_bytes": GIB // 2}, 422, "volume.too_small", "/size_bytes"),
        ({"snapshot": "nothing"}, 422, "volume.snapshot_unknown", "/snapshot"),
        ({"pool": "nothing"}, 422, "volume.pool_unknown", "/pool"),
        ({"vm": "nothing"}, 422, "volume.vm_unknown", "/vm"),
        ({"host": "a"}, 403, "volume.host_forbidden", None),
        ({"unlock": "nobody"}, 422, "request.invalid", "/unlock"),
        ({"limits": {"iops": -1}}, 422, "request.invalid", "/limits/iops"),
        ({"limits": {"burst_iops": 100}}, 422, "request.invalid", "/limits/burst_iops"),
        ({"limits": {"iops": 100, "burst_iops": 50}}, 422, "request.invalid", "/limits/burst_iops"),
        ({"queue_size": 16}, 422, "request.invalid", "/queue_size"),
        ({"queue_size": 2048}, 422, "request.invalid", "/queue_size"),
        ({"queue_size": 100}, 422, "request.invalid", "/queue_size"),
        ({"num_queues": 0}, 422, "request.invalid", "/num_queues"),
        ({"retention_hours": 9999}, 422, "request.invalid", "/retention_hours"),
        ({"colour": "red"}, 422, "request.invalid", "/colour"),
        ({"size_bytes": 91 * GIB}, 507, "storage_pool.no_space", None),
    ],
)
async def test_refused_and_nothing_made(member, api, changes, status, code, pointer):
    answer = await member.post(VOLUMES, json=BODY | changes)
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    if pointer is not None:
        assert pointer in [item["pointer"] for item in answer.json()["errors"]]
    assert await count(api, Volume, ProjectKey) == 0
    assert await reserved(api) == 0


async def test_a_full_pool_says_how_much_there_is(member, operator, api, host_id):
    assert (await member.post(VOLUMES, json=BODY | {"size_bytes": 80 * GIB})).status_code == 201
    full = await member.post(VOLUMES, json=BODY | {"name": "data-2", "size_bytes": 11 * GIB})
    assert (full.status_code, full.json()["code"]) == (507, "storage_pool.no_space")
    assert full.json()["context"]["most_free_bytes"] == 10 * GIB
    vm = {"name": "web", "image": "debian", "network": "net", "disk_bytes": 20 * GIB}
    refused = await member.post(VMS, json=vm)
    assert (refused.status_code, refused.json()["code"]) == (507, "vm.no_capacity")
    assert "storage pool primary" in refused.json()["detail"]
    (pool,) = (await operator.get("/v1/storage-pools")).json()["items"]
    assert (pool["reserved_bytes"], pool["allocatable_bytes"], pool["host"]) == (80 * GIB, 10 * GIB, "a")
    assert (await operator.get(f"/v1/storage-pools/{pool['id']}")).json()["conditions"][0]["type"] == "Available"
    assert (await member.get("/v1/storage-pools")).status_code == 403
    async with api.database.sessionmaker.begin() as session:
        await session.execute(update(StoragePool).values(free_bytes=9 * GIB))
    conditions = (await operator.get(f"/v1/storage-pools/{pool['id']}")).json()["conditions"]
    assert conditions[1]["reason"] == "storage_pool.low"


async def test_a_vm_with_volumes_keeps_them_apart_from_its_root(member, api):
    await member.post(VOLUMES, json=BODY)
    vm = {"name": "web", "image": "debian", "network": "net"}
    early = await member.post(VMS, json=vm | {"volumes": [{"volume": "data-1"}]})
    assert (early.status_code, early.json()["code"]) == (409, "volume.not_ready")
    await make_ready(api, "data-1")
    wanted = [{"volume": "data-1"}, {"name": "data-2", "size_bytes": GIB, "delete_with_vm": True}]
    made = await member.post(VMS, json=vm | {"volumes": wanted})
    assert made.status_code == 201, made.text
    assert len(made.json()["volume_ids"]) == 3
    volumes = {item["name"]: item for item in (await member.get(VOLUMES)).json()["items"]}
    assert volumes["data-1"]["vm"] == volumes["data-2"]["vm"] == "web"
    assert (volumes["data-1"]["delete_with_vm"], volumes["data-2"]["delete_with_vm"]) == (False, True)
    root = next(item for item in volumes.values() if item["is_root"])
    assert await reserved(api) == 3 * GIB
    again = await member.post(VMS, json=vm | {"name": "web-2", "volumes": [{"volume": "data-1"}]})
    assert (again.status_code, again.json()["code"]) == (409, "volume.attached")
    for body, pointer in (({}, "/volumes/0/volume"), ({"volume": "x", "size_bytes": GIB}, "/volumes/0/volume")):
        bad = await member.post(VMS, json=vm | {"name": "web-2", "volumes": [body]})
        assert (bad.status_code, bad.json()["errors"][0]["pointer"]) == (422, pointer), bad.text
    for name, code in (("data-1", "volume.in_use"), (root["name"], "volume.is_root")):
        refused = await member.delete(f"{VOLUMES}/{name}")
        assert (refused.status_code, refused.json()["code"]) == (409, code)
    assert (await member.post(f"{VOLUMES}/{root['id']}/detach")).json()["code"] == "volume.is_root"
    assert (await member.post(f"{VOLUMES}/data-1/attach", json={"vm": "web"})).json()["code"] == "volume.attached"
    generation = (await member.get(f"{VMS}/web")).json()["generation"]
    assert (await member.post(f"{VOLUMES}/data-1/detach")).json()["status"] == "detaching"
    assert (await member.get(f"{VMS}/web")).json()["generation"] == generation + 1


async def test_attaching_where_it_cannot_be(member, api):
    await member.post(VOLUMES, json=BODY)
    await make_ready(api, "data-1")
    other = await add_host(api.database.sessionmaker, "b")
    await add_pool(api, other)
    async with api.database.sessionmaker.begin() as session:
        await session.execute(update(Host).where(Host.name == "a").values(is_cordoned=True))
    assert (await member.post(VMS, json={"name": "web", "image": "debian", "network": "net"})).status_code == 201
    refused = await member.post(f"{VOLUMES}/data-1/attach", json={"vm": "web"})
    assert (refused.status_code, refused.json()["code"]) == (409, "volume.host_differs")
    assert refused.json()["context"]["hosts"] == ["a", "b"]
    unknown = await member.post(f"{VOLUMES}/data-1/attach", json={"vm": "nothing"})
    assert (unknown.status_code, unknown.json()["code"]) == (422, "volume.vm_unknown")
    free = await member.post(f"{VOLUMES}/data-1/detach")
    assert (free.status_code, free.json()["code"]) == (409, "volume.not_attached")
    async with api.database.sessionmaker() as session:
        assert await session.scalar(select(Vm.generation)) == 1


async def test_leaving_a_vm_that_waits_leaves_the_data_where_it_is(member, api, host_id):
    """Two hosts, the volume on the one that has no room for its machine: nothing moves a volume that has data."""
    assert (await member.post(VOLUMES, json=BODY)).status_code == 201
    await make_ready(api, "data-1")
    await add_pool(api, await add_host(api.database.sessionmaker, "b"), total=900 * GIB, free=900 * GIB)
    async with api.database.sessionmaker.begin() as session:
        before = await session.scalar(select(Volume.host_id).where(Volume.name == "data-1"))
        await session.execute(update(Host).where(Host.id == before).values(is_cordoned=True))
    body = {"name": "waits", "image": "debian", "network": "net", "volumes": [{"volume": "data-1"}], "on_no_capacity": "wait"}
    made = await member.post(VMS, json=body)
    assert made.status_code == 201, made.text
    room = await reserved(api)
    left = await member.post(f"{VOLUMES}/data-1/detach")
    assert left.status_code == 200, left.text
    async with api.database.sessionmaker() as session:
        assert await session.scalar(select(Volume.host_id).where(Volume.name == "data-1")) == before
    assert await reserved(api) == room


async def test_a_machine_that_would_take_a_protected_volume_with_it_stays(member, api):
    body = {"name": "vm-1", "image": "debian", "network": "net"}
    volume = {"name": "kept", "size_bytes": GIB, "delete_with_vm": True}
    made = await member.post(VMS, json=body | {"volumes": [volume]})
    assert made.status_code == 201, made.text
    assert (await member.patch(f"{VOLUMES}/kept", json={"is_protected": True})).status_code == 200
    refused = await member.delete(f"{VMS}/vm-1")
    assert (refused.status_code, refused.json()["code"]) == (409, "volume.protected"), refused.text


async def test_a_machine_says_which_key_it_waits_for(member, api):
    wanted = [{"name": "secret", "size_bytes": GIB}]
    made = await member.post(VMS, json={"name": "web", "image": "debian", "network": "net", "volumes": wanted})
    assert made.status_code == 201, made.text
    assert "VolumesLocked" not in [item["type"] for item in made.json()["conditions"]]
    async with api.database.sessionmaker.begin() as session:
        await session.execute(update(Volume).where(Volume.name == "secret").values(observed_state="locked"))
    (said,) = [item for item in (await member.get(f"{VMS}/web")).json()["conditions"] if item["type"] == "VolumesLocked"]
    assert (said["reason"], "secret" in said["message"]) == ("volume.locked", True)
    (said,) = [item for item in (await member.get(f"{VOLUMES}/secret")).json()["conditions"] if item["type"] == "Locked"]
    assert said["reason"] == "volume.locked"


async def test_a_quota_holds_volumes(member, operator, api):
    assert (await operator.patch("/v1/projects/ours", json={"quota": {"volumes": 1, "disk_bytes": 2 * GIB}})).status_code == 200
    assert (await member.post(VOLUMES, json=BODY)).status_code == 201
    second = await member.post(VOLUMES, json=BODY | {"name": "data-2"})
    assert (second.status_code, second.json()["code"]) == (403, "quota.exceeded")
    await make_ready(api, "data-1")
    grown = await member.post(f"{VOLUMES}/data-1/grow", json={"size_bytes": 3 * GIB})
    assert (grown.status_code, grown.json()["code"]) == (403, "quota.exceeded")


async def test_growing(member, api):
    await member.post(VOLUMES, json=BODY)
    assert (await member.post(f"{VOLUMES}/data-1/grow", json={"size_bytes": 2 * GIB})).json()["code"] == "volume.not_ready"
    await make_ready(api, "data-1")
    smaller = await member.post(f"{VOLUMES}/data-1/grow", json={"size_bytes": GIB // 2})
    assert (smaller.status_code, smaller.json()["code"]) == (422, "volume.shrink_refused")
    too_large = await member.post(f"{VOLUMES}/data-1/grow", json={"size_bytes": 200 * GIB})
    assert (too_large.status_code, too_large.json()["code"]) == (507, "storage_pool.no_space")
    grown = await member.post(f"{VOLUMES}/data-1/grow", json={"size_bytes": 3 * GIB})
    assert (grown.status_code, grown.json()["size_bytes"], grown.json()["generation"]) == (200, 3 * GIB, 2)
    assert await reserved(api) == 3 * GIB


async def test_snapshots_and_clones(member, api):
    await member.post(VOLUMES, json=BODY)
    early = await member.post(SNAPSHOTS, json={"name": "before", "volume": "data-1"})
    assert (early.status_code, early.json()["code"]) == (409, "snapshot.volume_not_ready")
    unknown = await member.post(SNAPSHOTS, json={"name": "before", "volume": "nothing"})
    assert (unknown.status_code, unknown.json()["code"]) == (422, "snapshot.volume_unknown")
    await make_ready(api, "data-1")
    made = await member.post(SNAPSHOTS, json={"name": "before", "volume": "data-1"})
    assert (made.status_code, made.json()["status"], made.json()["size_bytes"]) == (201, "creating", GIB)
    assert (await member.delete(f"{VOLUMES}/data-1")).json()["code"] == "volume.in_use"
    early = await member.post(VOLUMES, json={"name": "clone", "snapshot": "before"})
    assert (early.status_code, early.json()["code"]) == (409, "volume.snapshot_not_ready")
    await make_ready(api, "before")
    small = await member.post(VOLUMES, json={"name": "clone", "snapshot": "before", "size_bytes": GIB // 2})
    assert (small.status_code, small.json()["code"]) == (422, "volume.too_small")
    elsewhere = await member.post(VOLUMES, json={"name": "clone", "snapshot": "before", "pool": "backup"})
    assert (elsewhere.status_code, elsewhere.json()["code"]) == (422, "volume.pool_differs")
    clone = await member.post(VOLUMES, json={"name": "clone", "snapshot": "before"})
    assert (clone.status_code, clone.json()["size_bytes"]) == (201, GIB)
    refused = await member.delete(f"{SNAPSHOTS}/before")
    assert (refused.status_code, refused.json()["code"]) == (409, "snapshot.has_clones")
    second = await member.post(f"{VOLUMES}/data-1/snapshot", json={"name": "after", "is_protected": True})
    assert (second.status_code, second.json()["volume"]) == (200, "data-1")
    assert await reserved(api) == 4 * GIB
    assert (await member.delete(f"{SNAPSHOTS}/after")).json()["code"] == "snapshot.protected"
    await member.patch(f"{SNAPSHOTS}/after", json={"is_protected": False})
    assert (await member.delete(f"{SNAPSHOTS}/after")).status_code == 202


async def test_deletion_is_refused_retained_restored_and_done(member, api):
    await member.post(VOLUMES, json=BODY | {"is_protected": True, "retention_hours": 1})
    await make_ready(api, "data-1")
    refused = await member.delete(f"{VOLUMES}/data-1")
    assert (refused.status_code, refused.json()["code"]) == (409, "volume.protected")
    await member.patch(f"{VOLUMES}/data-1", json={"is_protected": False})
    kept = await member.delete(f"{VOLUMES}/data-1")
    assert (kept.status_code, kept.json()["status"]) == (202, "retained")
    assert (await member.get(f"{VOLUMES}/data-1")).json()["purge_at"] is not None
    assert (await member.post(f"{VOLUMES}/data-1/grow", json={"size_bytes": 2 * GIB})).json()["code"] == "volume.deleting"
    assert (await member.post(f"{VOLUMES}/data-1/restore")).json()["status"] == "available"
    assert (await member.post(f"{VOLUMES}/data-1/restore")).json()["code"] == "volume.not_retained"
    await member.patch(f"{VOLUMES}/data-1", json={"retention_hours": 0})
    assert (await member.delete(f"{VOLUMES}/data-1")).json()["status"] == "deleting"
    async with api.database.sessionmaker() as session:
        assert await session.scalar(select(Run.program).where(Run.program == "volume")) == "volume"


async def test_a_full_pool_is_measured_and_what_is_only_retained_makes_room(member, operator, anonymous, api, host_id):
    for name, hours in (("kept", 0), ("gone", 24)):
        await member.post(VOLUMES, json=BODY | {"name": name, "retention_hours": hours})
        await make_ready(api, name)
    await member.post(SNAPSHOTS, json={"name": "before", "volume": "gone"})
    await make_ready(api, "before")
    assert (await member.delete(f"{VOLUMES}/gone")).json()["status"] == "retained"
    (pool,) = (await operator.get("/v1/storage-pools")).json()["items"]
    path = f"/v1/storage-pools/{pool['id']}/reclaim"
    assert (await member.post(path, json={})).status_code in (403, 404)
    would = (await operator.post(path, json={})).json()
    assert (would["dry_run"], would["freed_bytes"], [item["name"] for item in would["volumes"]]) == (True, GIB, ["gone"])
    assert [(item["name"], item["bytes"]) for item in would["snapshots"]] == [("before", GIB)], "it stands on its own layer"
    done = await operator.post(path, json={"dry_run": False})
    assert (done.status_code, done.json()["freed_bytes"]) == (200, GIB), done.text
    async with api.database.sessionmaker() as session:
        assert await session.scalar(select(Volume.purge_at <= func.now()).where(Volume.name == "gone"))
    text = (await anonymous.get("/metrics")).text
    assert f'bedplate_storage_pool_free_bytes{{host="a",pool="primary",id="{pool["id"]}"}} {100 * GIB}' in text
    assert f'bedplate_storage_pool_reserved_bytes{{host="a",pool="primary",id="{pool["id"]}"}} {3 * GIB}' in text


async def test_others_see_nothing_of_it(member, stranger, anonymous):
    await member.post(VOLUMES, json=BODY)
    assert (await anonymous.get(VOLUMES)).status_code == 401
    for answer in (await stranger.get(f"{VOLUMES}/data-1"), await stranger.post(VOLUMES, json=BODY)):
        assert answer.status_code == 404
