"""The autoscaler over real rows: what gateways say becomes replicas, as many as there is room for, with a reason in words."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert

from controlplane.kernel import service as kernel
from controlplane.kernel.reconcile import ALL
from controlplane.kernel.registry import Registry
from controlplane.models.autoscaler import AutoscalerDecision, EndpointLoad
from controlplane.models.endpoint import Endpoint
from controlplane.resources.endpoint import service as endpoints
from controlplane.resources.endpoint.errors import EndpointAutoscaled
from controlplane.resources.endpoint.program import EndpointProgram
from controlplane.resources.endpoint.reconcile import AutoscalerReconciler, look
from controlplane.resources.replica.program import ReplicaProgram
from tests.programs.fleet import PROGRAMS, Fleet, open_fleet
from tests.programs.serving import Engines, create, import_model
from tests.programs.test_endpoint_life import shown

REGISTRY = Registry((*PROGRAMS, EndpointProgram, ReplicaProgram, AutoscalerReconciler))


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path, monkeypatch) -> AsyncIterator[Fleet]:
    for module in ("replica", "endpoint"):
        for name in ("SOON_SECONDS", "LOOK_SECONDS"):
            monkeypatch.setattr(f"controlplane.resources.{module}.program.{name}", 0.2, raising=False)
    async with open_fleet(database_url, tmp_path, REGISTRY) as fleet:
        fleet.links.stream = Engines().open
        await import_model(fleet)
        async with fleet.database.session() as session:
            await kernel.start(session, "autoscaler", ALL)
        yield fleet


async def tell(fleet: Fleet, endpoint_id: str, *, in_flight: float = 0.0, queued: float = 0.0, gateway: str = "gw0") -> None:
    """What a gateway writes each second."""
    row = {"in_flight": in_flight, "queued": queued, "requests_per_second": in_flight, "at": func.now()}
    row |= {"last_end_at": func.now() if in_flight else None}
    statement = insert(EndpointLoad).values(gateway=gateway, endpoint_id=endpoint_id, **row)
    changed = {name: value for name, value in row.items() if name != "last_end_at" or in_flight}
    async with fleet.database.session() as session:
        await session.execute(
            statement.on_conflict_do_update(index_elements=[EndpointLoad.gateway, EndpointLoad.endpoint_id], set_=changed)
        )


async def autoscaled(fleet: Fleet, **policy: object) -> str:
    endpoint_id = await create(fleet)
    async with fleet.database.session() as session:
        (await session.get_one(Endpoint, endpoint_id)).autoscale = {
            "min_replicas": 0,
            "max_replicas": 3,
            "target_in_flight": 4,
            "scale_down_delay_seconds": 0,
            "stable_seconds": 5,
            "panic_seconds": 1,
            "idle_seconds": 1,
            **policy,
        }
    return endpoint_id


async def until_replicas(fleet: Fleet, endpoint_id: str, count: int, **load: float) -> None:
    """Until that many are ready, and no more are there, while the gateway says so."""

    async def is_so() -> bool:
        await tell(fleet, endpoint_id, **load)
        seen = await shown(fleet, endpoint_id)
        assert seen
        return len(seen.replicas) == count == seen.row.replicas and seen.ready == count

    await fleet.until(is_so, f"{count} replicas", 30)


async def reasons(fleet: Fleet, endpoint_id: str) -> list[str]:
    query = select(AutoscalerDecision.reason).where(AutoscalerDecision.endpoint_id == endpoint_id)
    async with fleet.database.session() as session:
        return list(await session.scalars(query.order_by(AutoscalerDecision.id)))


async def test_up_down_to_zero_and_back(fleet: Fleet) -> None:
    await fleet.add_host("a")
    endpoint_id = await autoscaled(fleet)
    async with fleet.running():
        await until_replicas(fleet, endpoint_id, 3, in_flight=11.0)
        await until_replicas(fleet, endpoint_id, 0)
        await until_replicas(fleet, endpoint_id, 1, queued=1.0)
    said = await reasons(fleet, endpoint_id)
    assert said[0] == "1 → 3: panic mean 11.0 over target 4"
    assert any("→ 0: idle for" in reason for reason in said)
    assert any(reason.startswith("0 → ") for reason in said)


async def test_a_silent_gateway_takes_nothing_away(fleet: Fleet, monkeypatch) -> None:
    """One gateway says that nothing is to be done, another is silent: what it has to do is unknown."""
    await fleet.add_host("a")
    endpoint_id = await autoscaled(fleet)
    looks: list[float] = []

    async def counted(session, at):
        looks.append(at)
        return await look(session, at)

    monkeypatch.setattr("controlplane.resources.endpoint.reconcile.look", counted)
    async with fleet.running():
        await until_replicas(fleet, endpoint_id, 2, in_flight=7.0)
        async with fleet.database.session() as session:
            row = await session.get_one(EndpointLoad, ("gw0", endpoint_id))
            row.in_flight, row.at = 0.0, func.now() - timedelta(seconds=10)
        before, start = await reasons(fleet, endpoint_id), len(looks)

        async def has_looked() -> bool:
            await tell(fleet, endpoint_id, gateway="gw1")
            return len(looks) >= start + 4

        await fleet.until(has_looked, "four looks", 20)
    assert await reasons(fleet, endpoint_id) == before
    seen = await shown(fleet, endpoint_id)
    assert seen
    assert seen.row.replicas == 2


async def test_as_many_as_there_is_room_for(fleet: Fleet) -> None:
    await fleet.add_host("small", cpus=2)
    endpoint_id = await autoscaled(fleet, max_replicas=50, target_in_flight=1)
    async with fleet.running():

        async def is_full() -> bool:
            await tell(fleet, endpoint_id, in_flight=50.0)
            return any("room for" in reason for reason in await reasons(fleet, endpoint_id))

        await fleet.until(is_full, "a refusal", 30)
    seen = await shown(fleet, endpoint_id)
    assert seen
    assert 1 <= seen.row.replicas < 50
    assert any(condition.reason == "endpoint.no_capacity" for condition in seen.conditions)


async def test_scaling_by_hand_is_refused(fleet: Fleet) -> None:
    await fleet.add_host("a")
    endpoint_id = await autoscaled(fleet)
    async with fleet.database.session() as session:
        with pytest.raises(EndpointAutoscaled):
            await endpoints.scale(session, await session.get_one(Endpoint, endpoint_id), 2)
