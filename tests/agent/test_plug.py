"""Disks of a running machine follow its document, and stay where the guest keeps them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from controlplane.remote.fake import FakeLinks
from hostagent.drivers.machine.fake import FakeMachine
from hostagent.protocol.results import Failed, Succeeded
from hostagent.protocol.wanted import DiskWanted, Generation, SeedWanted, VmWanted, VolumeWanted
from hostagent.verbs import vm, volume
from tests.fakehost import FakeHost

VM = "vm_1"


def generation(number: int) -> Generation:
    return Generation(epoch=1, number=number)


def wanted(number: int, *volumes: str) -> VmWanted:
    return VmWanted(
        id=VM,
        generation=generation(number),
        driver="fake",
        vcpus=1,
        memory_bytes=1 << 28,
        image_id="",
        boot=None,
        disks=tuple(DiskWanted(volume_id=name) for name in volumes),
        nics=(),
        seed=SeedWanted(hostname="h"),
    )


@pytest.fixture
async def host(tmp_path: Path):
    fake = (await FakeHost.open("h", tmp_path)).join(FakeLinks())
    for name in ("vol_a", "vol_b"):
        await volume.ensure(fake.agent, VolumeWanted(id=name, generation=generation(1), size_bytes=1 << 20, backend="fake"))
    yield fake
    await fake.close()


async def test_disks_follow_and_a_guest_may_keep_one_for_a_while(host: FakeHost):
    agent, machine = host.agent, host.agent.drivers.machines["fake"]
    assert isinstance(machine, FakeMachine)
    assert isinstance((await vm.ensure(agent, wanted(1, "vol_a"))).result, Succeeded)
    started = agent.records.get(VM).starts
    assert isinstance((await vm.ensure(agent, wanted(2, "vol_a", "vol_b"))).result, Succeeded)
    assert machine.disks[VM] == {"vol_a", "vol_b"}
    assert host.storage.volumes["vol_b"].state == "exported"

    machine.kept.add("vol_b")
    document = wanted(3, "vol_a")
    failed = (await vm.ensure(agent, document)).result
    assert isinstance(failed, Failed)
    assert (failed.code, failed.retryable, failed.context["volumes"]) == ("vm.detach_waits", True, ["vol_b"])
    seen = await vm.KIND.observe(agent, VM, document)
    assert (seen.detail["disks"], seen.detail["detaching"]) == ("vol_a,vol_b", "vol_b")
    assert not vm.KIND.is_settled(document, seen), "it is asked again"
    assert host.storage.volumes["vol_b"].state == "exported", "not withdrawn under a guest that has it"

    machine.kept.clear()
    assert isinstance((await vm.ensure(agent, document)).result, Succeeded)
    seen = await vm.KIND.observe(agent, VM, document)
    assert (seen.detail["disks"], seen.detail["detaching"], seen.detail["restart_needed"]) == ("vol_a", "", False)
    assert host.storage.volumes["vol_b"].state == "idle"
    assert agent.records.get(VM).starts == started
    larger = replace(wanted(4, "vol_a"), vcpus=2)
    await vm.ensure(agent, larger)
    assert (await vm.KIND.observe(agent, VM, larger)).detail["restart_needed"]
