"""Roll-outs of endpoints on hosts with fake drivers: another shape replaces replicas, failures bring the former ones back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import func, select

from controlplane.core.ids import Kind, new_id
from controlplane.metering import latency
from controlplane.models.endpoint import Endpoint
from controlplane.models.endpoint_revision import RevisionTraffic
from controlplane.models.event import Event
from controlplane.models.operation import Operation
from controlplane.models.replica import Replica
from controlplane.models.vm import Vm
from controlplane.resources.endpoint import queries
from controlplane.resources.endpoint import service as endpoints
from controlplane.resources.endpoint.errors import EndpointNoEarlierRevision, EndpointNotRollingOut, EndpointRollingOut
from controlplane.resources.endpoint.schemas import EndpointUpdate
from controlplane.resources.replica.queries import ShownReplica
from tests.programs.fleet import Fleet, open_fleet
from tests.programs.serving import MODEL, REGISTRY, Engines, create, import_model, listing
from tests.programs.test_endpoint_life import change, shown, until_status

MEMORY = 1 << 30
AT_ONCE = {"watch_seconds": 0, "ramp_seconds": 0}


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path, engines: Engines, monkeypatch) -> AsyncIterator[Fleet]:
    for module in ("replica", "endpoint"):
        for name in ("SOON_SECONDS", "LOOK_SECONDS", "DRAIN_SECONDS", "ROLL_SECONDS"):
            monkeypatch.setattr(f"controlplane.resources.{module}.program.{name}", 0.2, raising=False)
    async with open_fleet(database_url, tmp_path, REGISTRY) as fleet:
        fleet.links.stream = engines.open
        await import_model(fleet)
        await fleet.add_host("a")
        await fleet.add_host("b")
        yield fleet


async def update_to(fleet: Fleet, endpoint_id: str, **changes: object) -> None:
    body = EndpointUpdate.model_validate(changes)
    async with fleet.database.session() as session:
        row = (await session.scalars(select(Endpoint).where(Endpoint.id == endpoint_id).with_for_update(key_share=True))).one()
        await endpoints.update(session, row, body)
        await session.flush()
        operation = Operation(
            id=new_id(Kind.OPERATION),
            action="endpoint.update",
            actor="tester",
            subject_kind="endpoint",
            subject_id=row.id,
            subject_generation=row.generation,
        )
        session.add(operation)


def living(seen: queries.ShownEndpoint) -> list[ShownReplica]:
    return [replica for replica in seen.replicas if replica.row.state != "deleting"]


async def until_at_rest(fleet: Fleet, endpoint_id: str, revision: int) -> queries.ShownEndpoint:
    async def is_so() -> bool:
        seen = await shown(fleet, endpoint_id)
        return seen is not None and seen.row.rollout is None and seen.row.revision == revision and seen.status == "ready"

    await fleet.until(is_so, f"revision {revision} at rest", 30)
    seen = await shown(fleet, endpoint_id)
    assert seen
    return seen


async def until_said(fleet: Fleet, endpoint_id: str, words: str) -> None:
    async def is_said() -> bool:
        seen = await shown(fleet, endpoint_id)
        return seen is not None and words in seen.conditions[2].message

    await fleet.until(is_said, words, 30)


async def kinds(fleet: Fleet) -> list[str]:
    async with fleet.database.session() as session:
        return list(await session.scalars(select(Event.kind).where(Event.kind.like("endpoint.roll%")).order_by(Event.id)))


async def operations(fleet: Fleet) -> list[tuple[str, str | None]]:
    async with fleet.database.session() as session:
        rows = await session.scalars(select(Operation).where(Operation.action == "endpoint.update").order_by(Operation.id))
        return [(row.state, row.error_code) for row in rows]


async def test_another_shape_replaces_every_replica(fleet: Fleet) -> None:
    endpoint_id = await create(fleet, replicas=2)
    async with fleet.running():
        before = await until_status(fleet, endpoint_id, "ready")
        await update_to(fleet, endpoint_id, memory_bytes=MEMORY, rollout=AT_ONCE)
        after = await until_at_rest(fleet, endpoint_id, 2)
        assert {replica.row.id for replica in before.replicas}.isdisjoint(replica.row.id for replica in living(after))
        assert [replica.row.revision for replica in living(after)] == [2, 2]
        assert [replica.vm.memory_bytes for replica in living(after)] == [MEMORY, MEMORY]
        assert after.conditions[2].status == "true"

        async def has_ended() -> bool:
            return await operations(fleet) == [("succeeded", None)]

        await fleet.until(has_ended, "the operation ended", 30)
        assert await kinds(fleet) == ["endpoint.rolled_out"]
        await update_to(fleet, endpoint_id, memory_bytes=MEMORY)  # nothing is other than it is
        assert (await shown(fleet, endpoint_id)).row.rollout is None
        await change(fleet, endpoint_id, endpoints.roll_back)
        back = await until_at_rest(fleet, endpoint_id, 1)
        assert {replica.row.revision for replica in living(back)} == {1}
        with pytest.raises(EndpointNoEarlierRevision):
            await change(fleet, endpoint_id, endpoints.roll_back)


async def test_a_revision_that_never_serves_goes_and_the_former_one_stays(fleet: Fleet, engines: Engines) -> None:
    endpoint_id = await create(fleet)
    async with fleet.running():
        before = await until_status(fleet, endpoint_id, "ready")
        (kept,) = before.replicas
        engines.by_machine[kept.row.vm_id] = listing(MODEL)
        engines.says = listing("another")
        await update_to(fleet, endpoint_id, memory_bytes=MEMORY, rollout={**AT_ONCE, "ready_seconds": 5})
        await until_said(fleet, endpoint_id, "revision 2 was taken back")
        after = await until_at_rest(fleet, endpoint_id, 1)
        assert [replica.row.id for replica in living(after)] == [kept.row.id]
        assert "it serves another" in after.conditions[2].message
        assert await operations(fleet) == [("failed", "endpoint.rolled_back")]
        assert await kinds(fleet) == ["endpoint.rollout_failed", "endpoint.rolled_back"]
        engines.says = listing(MODEL)
        await update_to(fleet, endpoint_id, memory_bytes=2 * MEMORY, rollout=AT_ONCE)
        again = await until_at_rest(fleet, endpoint_id, 3)  # numbers are never used again
        assert again.conditions[2].status == "true"


async def test_held_at_its_share_until_promoted(fleet: Fleet) -> None:
    endpoint_id = await create(fleet)
    async with fleet.running():
        await until_status(fleet, endpoint_id, "ready")
        with pytest.raises(EndpointNotRollingOut):
            await change(fleet, endpoint_id, endpoints.promote)
        await update_to(fleet, endpoint_id, memory_bytes=MEMORY, rollout={**AT_ONCE, "is_held": True, "weight": 5})
        await until_said(fleet, endpoint_id, "5 % of the requests go there; held until `endpoint promote`")
        assert len((await shown(fleet, endpoint_id)).replicas) == 2
        with pytest.raises(EndpointRollingOut):
            await update_to(fleet, endpoint_id, memory_bytes=2 * MEMORY)
        await change(fleet, endpoint_id, endpoints.promote)
        after = await until_at_rest(fleet, endpoint_id, 2)
        assert len(living(after)) == 1


async def test_errors_that_gateways_see_bring_the_former_one_back(fleet: Fleet) -> None:
    endpoint_id = await create(fleet)
    async with fleet.running():
        await until_status(fleet, endpoint_id, "ready")
        await update_to(fleet, endpoint_id, memory_bytes=MEMORY, rollout={"is_held": True, "ramp_seconds": 0})
        await until_said(fleet, endpoint_id, "10 % of the requests go there")
        async with fleet.database.session() as session:
            for revision, failed in ((1, 0), (2, 5)):
                counts = {"requests": 25, "failures": failed, "ttft_counts": latency.none(), "at": func.now()}
                session.add(RevisionTraffic(gateway="g", endpoint_id=endpoint_id, revision=revision, **counts))
        await until_said(fleet, endpoint_id, "5 of 25 requests failed (20 %)")
        after = await until_at_rest(fleet, endpoint_id, 1)
        assert len(living(after)) == 1


async def test_without_room_for_a_surge_one_goes_before_another_comes(fleet: Fleet) -> None:
    endpoint_id = await create(fleet, replicas=2)
    async with fleet.running():
        await until_status(fleet, endpoint_id, "ready")
        in_place = {**AT_ONCE, "max_surge": 0, "max_unavailable": 1}
        await update_to(fleet, endpoint_id, vcpus=2, rollout=in_place)
        after = await until_at_rest(fleet, endpoint_id, 2)
        assert [replica.vm.vcpus for replica in living(after)] == [2, 2]


async def test_deleted_in_the_middle_nothing_stays(fleet: Fleet) -> None:
    endpoint_id = await create(fleet)
    async with fleet.running():
        await until_status(fleet, endpoint_id, "ready")
        await update_to(fleet, endpoint_id, memory_bytes=MEMORY, rollout={"is_held": True})
        await until_said(fleet, endpoint_id, "10 % of the requests go there")
        await change(fleet, endpoint_id, endpoints.remove)

        async def is_gone() -> bool:
            return await shown(fleet, endpoint_id) is None

        await fleet.until(is_gone, "gone", 30)
    async with fleet.database.session() as session:
        assert list(await session.scalars(select(Replica.id))) == []
        assert list(await session.scalars(select(Vm.id))) == []


async def test_an_endpoint_without_replicas_has_nothing_to_exchange(fleet: Fleet) -> None:
    endpoint_id = await create(fleet, replicas=0)
    async with fleet.running():
        await until_status(fleet, endpoint_id, "idle")
        await update_to(fleet, endpoint_id, memory_bytes=MEMORY)

        async def is_over() -> bool:
            seen = await shown(fleet, endpoint_id)
            return seen is not None and seen.row.rollout is None and seen.row.revision == 2

        await fleet.until(is_over, "over", 30)
        await change(fleet, endpoint_id, _scaled_to_one)
        after = await until_at_rest(fleet, endpoint_id, 2)
        assert living(after)[0].vm.memory_bytes == MEMORY


async def _scaled_to_one(session, endpoint) -> None:
    await endpoints.scale(session, endpoint, 1)
