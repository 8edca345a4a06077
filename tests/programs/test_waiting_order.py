"""Machines that wait for room get it in the order they asked, whoever else asks meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import select

from controlplane.models.vm import Vm
from controlplane.resources.vm.errors import VmNoCapacity
from tests.programs.fleet import GIB, Fleet, open_fleet


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with open_fleet(database_url, tmp_path) as fleet:
        await fleet.add_host("a", cpus=2, memory_bytes=8 * GIB)
        yield fleet


SIZE = {"vcpus": 1, "memory_bytes": GIB}


async def placed(fleet: Fleet) -> set[str]:
    async with fleet.database.session() as session:
        return set(await session.scalars(select(Vm.name).where(Vm.state == "placed")))


async def until_placed(fleet: Fleet, name: str) -> None:
    async def is_placed() -> bool:
        return name in await placed(fleet)

    await fleet.until(is_placed, f"{name} placed")


async def test_a_new_request_does_not_overtake_and_waiting_ones_are_served_in_order(fleet: Fleet) -> None:
    """One room is freed at a time, while six clients ask for it as fast as they can."""
    first = [await fleet.create_vm(f"first{n}", **SIZE) for n in range(2)]
    waiting = [f"w{n}" for n in range(4)]
    ids = {name: await fleet.create_vm(name, on_no_capacity="wait", **SIZE) for name in waiting}
    assert await placed(fleet) == {"first0", "first1"}
    overtaken: list[str] = []
    refusals: set[str] = set()
    is_over = asyncio.Event()

    async def greedy(number: int) -> None:
        count = 0
        while not is_over.is_set():
            count += 1
            try:
                overtaken.append(await fleet.create_vm(f"greedy{number}-{count}", **SIZE))
            except VmNoCapacity as error:
                refusals.add("earlier" if "earlier" in str(error) else "free")
            await asyncio.sleep(0.01)

    async with fleet.running():
        clients = [asyncio.create_task(greedy(number)) for number in range(6)]
        here = [*first, *ids.values()]
        for turn, name in enumerate(waiting):
            await fleet.delete_vm(here[turn])
            await until_placed(fleet, name)
            later = set(waiting[turn + 1 :])
            assert not later & await placed(fleet), f"{name} was not the next"
        is_over.set()
        await asyncio.gather(*clients)
        assert overtaken == []
        assert "earlier" in refusals


async def test_two_rooms_at_once_serve_two(fleet: Fleet) -> None:
    first = await fleet.create_vm("first", vcpus=2, memory_bytes=GIB)
    for name in ("w0", "w1"):
        await fleet.create_vm(name, on_no_capacity="wait", **SIZE)
    async with fleet.running():
        await fleet.delete_vm(first)
        for name in ("w0", "w1"):
            await until_placed(fleet, name)


async def test_a_smaller_one_and_one_elsewhere_are_not_held_back(fleet: Fleet) -> None:
    """Larger ones, and those bound to another host, do not compete for this room."""
    other = await fleet.add_host("b", cpus=2, memory_bytes=GIB // 2, address=2)
    await fleet.create_vm("large", on_no_capacity="wait", vcpus=64, memory_bytes=GIB)
    await fleet.create_vm("there", on_no_capacity="wait", placement={"host": "b"}, **SIZE)
    assert await placed(fleet) == set()
    await fleet.create_vm("small", **SIZE)
    assert await placed(fleet) == {"small"}
    assert other


async def test_what_failed_for_good_holds_nobody_back(fleet: Fleet) -> None:
    await fleet.create_vm("full", vcpus=2, memory_bytes=GIB)
    stuck = await fleet.create_vm("stuck", on_no_capacity="wait", **SIZE)
    await fleet.create_vm("next", on_no_capacity="wait", **SIZE)
    async with fleet.database.session() as session:
        connection = await session.connection()
        await connection.exec_driver_sql(
            "UPDATE run SET parked_at = now(), parked_code = 'x', step = 'place', wake_at = NULL WHERE subject = $1", (stuck,)
        )
        full = (await session.scalars(select(Vm).where(Vm.name == "full"))).one().id
    async with fleet.running():
        await fleet.delete_vm(full)
        await until_placed(fleet, "next")
