"""Placement on real PostgreSQL: nothing is given away twice, whatever runs at the same time, and refusals say why."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from controlplane.core.ids import Kind, new_id
from controlplane.models.host import Host
from controlplane.models.reservation import Reservation
from controlplane.placement.explain import explain, verdicts
from controlplane.placement.request import MIB, PlacementRequest
from controlplane.placement.reserve import release, reserve, resize_reservation

GIB = 1 << 30


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(database_url.replace("postgresql://", "postgresql+asyncpg://"), pool_size=60)
    yield engine
    await engine.dispose()


@pytest.fixture
def sessions(engine: AsyncEngine) -> async_sessionmaker[AsyncSession]:
    return async_sessionmaker(engine, expire_on_commit=False)


def make_host(name: str, **changes: object) -> Host:
    values = {
        "id": new_id(Kind.HOST),
        "name": name,
        "address": f"{name}.test",
        "state": "ready",
        "facts": {},
        "facts_at": func.now(),
        "ssh_key_sealed": b"sealed",
        "ssh_public_key": "ssh-ed25519 AAAA",
        "architecture": "x86_64",
        "machine_drivers": ["fake"],
        "allocatable_vcpus": 4,
        "allocatable_memory_bytes": 8 * GIB,
    }
    return Host(**values | changes)


async def add(sessions: async_sessionmaker[AsyncSession], *hosts: Host) -> None:
    async with sessions.begin() as session:
        session.add_all(hosts)


async def assert_sums_hold(sessions: async_sessionmaker[AsyncSession]) -> None:
    async with sessions() as session:
        held = select(
            Reservation.host_id,
            func.sum(Reservation.vcpus).label("vcpus"),
            func.sum(Reservation.memory_bytes).label("memory_bytes"),
        ).group_by(Reservation.host_id)
        sums = {row.host_id: (row.vcpus, row.memory_bytes) for row in await session.execute(held)}
        for host in await session.scalars(select(Host)):
            assert (host.reserved_vcpus, host.reserved_memory_bytes) == sums.get(host.id, (0, 0))
            assert host.reserved_vcpus <= host.allocatable_vcpus
            assert host.reserved_memory_bytes <= host.allocatable_memory_bytes


ONE = PlacementRequest(vcpus=1, memory_bytes=GIB - 128 * MIB)


async def test_fifty_at_once_take_exactly_what_there_is(sessions: async_sessionmaker[AsyncSession]) -> None:
    await add(sessions, *(make_host(f"h{n}", allocatable_vcpus=3 + n) for n in range(5)))  # 3+4+5+6+7 = 25 cores

    async def ask() -> str | None:
        async with sessions.begin() as session:
            placement = await reserve(session, new_id(Kind.VM), ONE)
            await asyncio.sleep(0)
            return placement.host_id if placement else None

    placed = Counter(await asyncio.gather(*(ask() for _ in range(50))))
    assert placed.pop(None) == 25
    assert sum(placed.values()) == 25
    await assert_sums_hold(sessions)


async def test_takers_and_givers_at_once_keep_the_sums(sessions: async_sessionmaker[AsyncSession]) -> None:
    await add(sessions, *(make_host(f"h{n}") for n in range(3)))

    async def come_and_go() -> int:
        placed = 0
        for _ in range(5):
            subject = new_id(Kind.VM)
            async with sessions.begin() as session:
                is_placed = await reserve(session, subject, ONE) is not None
            placed += is_placed
            if is_placed:
                async with sessions.begin() as session:
                    assert await release(session, subject)
        return placed

    assert sum(await asyncio.gather(*(come_and_go() for _ in range(20)))) > 0
    await assert_sums_hold(sessions)
    async with sessions() as session:
        assert await session.scalar(select(func.sum(Host.reserved_vcpus))) == 0


async def test_reserving_twice_is_once_and_releasing_twice_too(sessions: async_sessionmaker[AsyncSession]) -> None:
    await add(sessions, make_host("h"))
    async with sessions.begin() as session:
        first = await reserve(session, "vm_x", ONE)
        assert await reserve(session, "vm_x", ONE) == first
    async with sessions.begin() as session:
        assert await release(session, "vm_x")
        assert not await release(session, "vm_x")
    await assert_sums_hold(sessions)


async def test_a_refused_transaction_takes_nothing(sessions: async_sessionmaker[AsyncSession]) -> None:
    await add(sessions, make_host("h"))
    async with sessions() as session:
        assert await reserve(session, "vm_x", ONE)
        await session.rollback()
    await assert_sums_hold(sessions)


@pytest.mark.parametrize(
    ("changes", "request_", "reason"),
    [
        ({"state": "enrolling"}, ONE, "ready"),
        ({"is_cordoned": True}, ONE, "ready"),
        ({"link": "lost", "link_changed_at": func.now()}, ONE, "ready"),
        ({"roles": ["gateway"]}, ONE, "role"),
        ({}, PlacementRequest(vcpus=1, memory_bytes=GIB, location="rack2"), "location"),
        ({"labels": {"disk": "hdd"}}, PlacementRequest(vcpus=1, memory_bytes=GIB, labels={"disk": "nvme"}), "labels"),
        ({"architecture": "aarch64"}, ONE, "architecture"),
        ({"machine_drivers": ["qemu"]}, PlacementRequest(vcpus=1, memory_bytes=GIB, isolation="container"), "driver"),
        ({"machine_drivers": []}, ONE, "driver"),
        ({}, PlacementRequest(vcpus=5, memory_bytes=GIB), "vcpus"),
        ({}, PlacementRequest(vcpus=1, memory_bytes=8 * GIB), "memory"),
    ],
)
async def test_each_filter_refuses_and_says_so(
    sessions: async_sessionmaker[AsyncSession], changes: dict[str, object], request_: PlacementRequest, reason: str
) -> None:
    await add(sessions, make_host("h", **changes))
    async with sessions.begin() as session:
        assert await reserve(session, "vm_x", request_) is None
        explanation = await explain(session, request_)
        (verdict,) = await verdicts(session, request_)
    assert (explanation.hosts, explanation.fitting) == (1, 0)
    assert [item.filter for item in explanation.short] == [reason]
    assert reason in verdict.rejected_by


async def test_explanation_counts_hosts_and_names_the_most_that_is_free(sessions: async_sessionmaker[AsyncSession]) -> None:
    await add(
        sessions,
        make_host("full", reserved_vcpus=4),
        make_host("half", reserved_vcpus=2, reserved_memory_bytes=7 * GIB),
        make_host("off", is_cordoned=True),
    )
    async with sessions.begin() as session:
        explanation = await explain(session, PlacementRequest(vcpus=3, memory_bytes=2 * GIB))
    short = {item.filter: (item.hosts, item.most_free) for item in explanation.short}
    assert short == {"ready": (1, None), "vcpus": (2, 2), "memory": (1, 8 * GIB)}
    assert "None of 3 hosts" in explanation.sentence


async def test_machines_spread_over_equal_hosts(sessions: async_sessionmaker[AsyncSession]) -> None:
    await add(sessions, make_host("a"), make_host("b"))
    hosts = set()
    for subject in ("vm_1", "vm_2"):
        async with sessions.begin() as session:
            placement = await reserve(session, subject, ONE)
            assert placement
            hosts.add(placement.host_id)
    assert len(hosts) == 2


async def test_growing_needs_room_and_shrinking_never_does(sessions: async_sessionmaker[AsyncSession]) -> None:
    await add(sessions, make_host("h"))
    async with sessions.begin() as session:
        assert await reserve(session, "vm_x", ONE)
        assert await reserve(session, "vm_y", ONE)
        assert await resize_reservation(session, "vm_x", PlacementRequest(vcpus=3, memory_bytes=GIB))
        assert not await resize_reservation(session, "vm_x", PlacementRequest(vcpus=4, memory_bytes=GIB))
        await session.execute(update(Host).values(allocatable_vcpus=2))
        assert await resize_reservation(session, "vm_x", PlacementRequest(vcpus=1, memory_bytes=GIB))
    await assert_sums_hold(sessions)
