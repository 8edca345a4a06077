"""The life of a VM on hosts with fake drivers: made, changed, lost, found, deleted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import func, select, update

from controlplane.models.host import Host
from controlplane.models.nic import Nic
from controlplane.models.reservation import Reservation
from controlplane.models.run import Run
from controlplane.models.volume import Volume
from controlplane.resources.vm import service as vms
from controlplane.resources.vm.schemas import VmResize
from hostagent.protocol.errors import AgentError
from hostagent.protocol.wanted import VmWanted
from tests.programs.fleet import GIB, Fleet, open_fleet


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with open_fleet(database_url, tmp_path) as fleet:
        yield fleet


def document(fleet: Fleet, host_id: str, vm_id: str) -> VmWanted:
    found = fleet.hosts[host_id].agent.documents.get("vm", vm_id)
    assert isinstance(found, VmWanted)
    return found


async def test_from_request_to_running_and_back_to_nothing(fleet: Fleet) -> None:
    await fleet.add_host("a")
    vm_id = await fleet.create_vm(user_data="#!/bin/sh\ntrue\n")
    async with fleet.running():
        vm = await fleet.until_ready(vm_id)
        assert (vm.state, vm.observed_power, vm.driver) == ("placed", "running", "fake")
        wanted = document(fleet, vm.host_id or "", vm_id)
        assert wanted.seed.user_data == "#!/bin/sh\ntrue\n"
        assert wanted.nics[0].ipv4.startswith("10.192.0.")
        await fleet.delete_vm(vm_id)
        await fleet.until_gone(vm_id)
    assert await fleet.on_hosts() == []
    async with fleet.database.session() as session:
        for model in (Nic, Volume, Reservation):
            assert await session.scalar(select(func.count()).select_from(model)) == 0
        assert await session.scalar(select(Host.reserved_vcpus)) == 0


async def test_stop_start_restart(fleet: Fleet) -> None:
    await fleet.add_host("a")
    vm_id = await fleet.create_vm()
    async with fleet.running():
        vm = await fleet.until_ready(vm_id)
        await fleet.change(vm_id, vms.stop)
        assert (await fleet.until_ready(vm_id)).observed_power == "stopped"
        await fleet.change(vm_id, vms.start)
        assert (await fleet.until_ready(vm_id)).observed_power == "running"
        await fleet.change(vm_id, vms.restart)
        vm = await fleet.until_ready(vm_id)
        assert document(fleet, vm.host_id or "", vm_id).restart_generation == 1


async def test_resize_applies_at_the_restart_and_holds_the_larger_size_until_then(fleet: Fleet) -> None:
    await fleet.add_host("a", cpus=4)
    vm_id = await fleet.create_vm(vcpus=2, memory_bytes=GIB)

    async def held() -> int:
        async with fleet.database.session() as session:
            return await session.scalar(select(Host.reserved_vcpus)) or 0

    async with fleet.running():
        vm = await fleet.until_ready(vm_id)
        host_id = vm.host_id or ""
        await fleet.change(vm_id, lambda session, vm: vms.resize(session, vm, VmResize(vcpus=1)))
        vm = await fleet.until_ready(vm_id)
        assert (vm.vcpus, vm.applied_vcpus, document(fleet, host_id, vm_id).vcpus, await held()) == (1, 2, 2, 2)
        await fleet.change(vm_id, vms.restart)
        vm = await fleet.until_ready(vm_id)
        assert (vm.applied_vcpus, document(fleet, host_id, vm_id).vcpus, await held()) == (1, 1, 1)
        await fleet.change(vm_id, vms.stop)
        await fleet.until_ready(vm_id)
        await fleet.change(vm_id, lambda session, vm: vms.resize(session, vm, VmResize(vcpus=4)))
        assert (await fleet.until_ready(vm_id)).applied_vcpus == 4


async def test_who_waits_is_placed_when_room_returns(fleet: Fleet) -> None:
    await fleet.add_host("a", cpus=1)
    first = await fleet.create_vm("first")
    second = await fleet.create_vm("second", on_no_capacity="wait")
    async with fleet.running():
        await fleet.until_ready(first)
        vm = await fleet.vm(second)
        assert vm
        assert vm.state == "waiting"
        assert vm.shortage
        assert "without 1 free core" in str(vm.shortage["detail"])
        await fleet.delete_vm(first)
        await fleet.until_ready(second, seconds=10)


async def test_two_vms_share_one_upload(fleet: Fleet) -> None:
    await fleet.add_host("a")
    ids = [await fleet.create_vm(f"web-{n}") for n in range(3)]
    async with fleet.running():
        for vm_id in ids:
            await fleet.until_ready(vm_id)
    uploads = [body for _, verb, body in fleet.links.calls if verb == "upload"]
    assert len(uploads) == len(set(uploads)) == 3


async def test_hosts_get_routes_to_each_others_vms(fleet: Fleet) -> None:
    a, b = await fleet.add_host("a", address=1), await fleet.add_host("b", address=2)
    await fleet.create_network("plain", "none")
    ids = [await fleet.create_vm(f"web-{n}", network="plain") for n in range(2)]
    async with fleet.running():
        where = {(await fleet.until_ready(vm_id)).host_id: vm_id for vm_id in ids}
        assert set(where) == {a.id, b.id}

        async def is_routed() -> bool:
            routes = [await fake.routes.observe() for fake in (a, b)]
            return all(seen is not None and len(seen.routes) == 2 for seen in routes)

        await fleet.until(is_routed, "routes on both hosts")
        seen = await a.routes.observe()
        assert seen
        assert {route.via for route in seen.routes} == {"192.0.2.2", "2001:db8::2"}
        await fleet.delete_vm(where[b.id])
        await fleet.until_gone(where[b.id])

        async def is_unrouted() -> bool:
            seen = await a.routes.observe()
            return seen is None or not seen.routes

        await fleet.until(is_unrouted, "routes gone")


async def test_a_killed_machine_is_seen_and_comes_back(fleet: Fleet) -> None:
    fake = await fleet.add_host("a")
    vm_id = await fleet.create_vm()
    async with fleet.running():
        await fleet.until_ready(vm_id)
        await fake.supervisor.remove(f"fakevm-{vm_id}")
        await fleet.tell("vm", vm_id)

        async def is_seen() -> bool:
            vm = await fleet.vm(vm_id)
            return vm is not None and vm.observed_power != "running"

        await fleet.until(is_seen, "the loss seen")
        await fake.look()
        await fleet.tell("vm", vm_id)
        await fleet.until_ready(vm_id)


async def test_a_document_lost_by_the_host_is_said_again(fleet: Fleet) -> None:
    fake = await fleet.add_host("a")
    vm_id = await fleet.create_vm()
    async with fleet.running():
        await fleet.until_ready(vm_id)
        await fake.supervisor.remove(f"fakevm-{vm_id}")
        fake.agent.documents.drop("vm", vm_id)
        await fleet.tell("vm", vm_id)

        async def is_back() -> bool:
            return fake.agent.documents.get("vm", vm_id) is not None

        await fleet.until(is_back, "the document back")
        await fleet.until_ready(vm_id)


async def test_an_unreachable_host_is_waited_for(fleet: Fleet) -> None:
    fake = await fleet.add_host("a")
    fleet.links.cut(fake.id, "no route to host")
    vm_id = await fleet.create_vm()
    async with fleet.running():

        async def has_tried() -> bool:
            async with fleet.database.session() as session:
                errors = await session.scalars(select(Run.last_error).where(Run.program == "image_copy"))
                return any("no route to host" in (error or "") for error in errors)

        await fleet.until(has_tried, "an error with the cause")
        fleet.links.mend(fake.id)
        await fleet.until_ready(vm_id, seconds=30)


async def test_a_host_with_another_key_is_the_hosts_trouble_not_each_machines(fleet: Fleet) -> None:
    """One incident for the host, by who watches it; a machine at rest there waits as for one that is out of reach."""
    fake = await fleet.add_host("a")
    vm_id = await fleet.create_vm()
    async with fleet.running():
        await fleet.until_ready(vm_id)
        fleet.links.change_key(fake.id)
        looks = fleet.links.refused
        async with fleet.database.session() as session:
            from controlplane.kernel import service

            await service.start(session, "vm", vm_id)
            await session.commit()

        async def has_looked() -> bool:
            return fleet.links.refused > looks and (await run_of(fleet, vm_id)).lease is None

        await fleet.until(has_looked, "a look at the host")
        run = await run_of(fleet, vm_id)
        assert (run.step, run.last_error) == ("serve", None)


async def run_of(fleet: Fleet, subject: str) -> Run:
    async with fleet.database.session() as session:
        return (await session.scalars(select(Run).where(Run.subject == subject))).one()


async def test_a_full_disk_is_named_and_tried_again(fleet: Fleet) -> None:
    fake = await fleet.add_host("a")
    fake.faults.fail("storage.apply", AgentError("disk.full", "0 bytes are free"))
    vm_id = await fleet.create_vm()
    async with fleet.running():
        await fleet.until_ready(vm_id, seconds=30)


async def test_what_the_host_can_never_do_parks_the_run(fleet: Fleet) -> None:
    fake = await fleet.add_host("a")
    fake.faults.fail("machine.apply", AgentError("vm.unsupported", "no such boot", retryable=False))
    vm_id = await fleet.create_vm()
    async with fleet.running():

        async def is_parked() -> bool:
            return (await fleet.run_of("vm", vm_id)).parked_code == "vm.unsupported"

        await fleet.until(is_parked, "parked")
        await fleet.delete_vm(vm_id)
        await fleet.until_gone(vm_id)
    assert await fleet.on_hosts() == []


async def test_a_vm_on_a_lost_host_keeps_its_place(fleet: Fleet) -> None:
    fake = await fleet.add_host("a")
    vm_id = await fleet.create_vm()
    async with fleet.running():
        await fleet.until_ready(vm_id)
        fleet.links.cut(fake.id)
        async with fleet.database.session() as session:
            await session.execute(update(Host).values(link="lost", link_changed_at=func.now()))
        await fleet.change(vm_id, vms.stop)
        await fleet.tell("vm", vm_id)
        vm = await fleet.vm(vm_id)
        assert vm
        assert (vm.host_id, vm.observed_power) == (fake.id, "running")
        fleet.links.mend(fake.id)
        await fleet.until_ready(vm_id, seconds=30)


async def test_a_vm_of_a_forgotten_host_can_be_deleted(fleet: Fleet) -> None:
    fake = await fleet.add_host("a")
    vm_id = await fleet.create_vm()
    async with fleet.running():
        await fleet.until_ready(vm_id)
        fleet.links.cut(fake.id)
        async with fleet.database.session() as session:
            await session.execute(update(Host).values(state="removing", removing_at=func.now(), is_forgotten=True))
        await fleet.delete_vm(vm_id)
        await fleet.until_gone(vm_id)
