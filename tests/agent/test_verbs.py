"""The verbs by themselves: generations, tombstones, restarts, images, through the same fake host that programs use."""

from __future__ import annotations

import hashlib
import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane.remote.fake import FakeLinks
from hostagent.protocol.errors import AgentError
from hostagent.protocol.results import Failed, Running, Succeeded
from hostagent.protocol.wanted import (
    DiskWanted,
    FileWanted,
    Generation,
    ImageWanted,
    KernelBoot,
    NicWanted,
    SeedWanted,
    VmWanted,
    VolumeWanted,
)
from hostagent.serve.keeper import Keeper
from hostagent.serve.metrics import Metrics
from hostagent.verbs.jobs import Job, Result
from tests.fakehost import FakeHost

ONE, TWO, THREE = (Generation(epoch=1, number=number) for number in (1, 2, 3))
VM = "vm_1"
KERNEL, ROOT = b"kernel", b"root disk"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def image_wanted(generation: Generation = ONE) -> ImageWanted:
    files = tuple(
        FileWanted(name=name, sha256=sha256(content), size_bytes=len(content))
        for name, content in (("vmlinuz", KERNEL), ("boot/root.img", ROOT))
    )
    return ImageWanted(id="img_1", generation=generation, purpose="guest", files=files)


def volume_wanted(generation: Generation = ONE, size_bytes: int = 1 << 20) -> VolumeWanted:
    return VolumeWanted(
        id="vol_1", generation=generation, size_bytes=size_bytes, image_id="img_1", image_file="boot/root.img", backend="fake"
    )


def vm_wanted(generation: Generation = ONE) -> VmWanted:
    nic = NicWanted(id="nic_000000000001", generation=generation, mac="06:00:00:00:00:01", ipv4="10.0.0.2", ipv6="fd00::2")
    return VmWanted(
        id=VM,
        generation=generation,
        driver="fake",
        vcpus=1,
        memory_bytes=1 << 28,
        image_id="img_1",
        boot=KernelBoot(kernel_file="vmlinuz", initramfs_file="", cmdline=""),
        disks=(DiskWanted(volume_id="vol_1", is_boot=True),),
        nics=(nic,),
        seed=SeedWanted(hostname="one", ssh_authorized_keys=("ssh-ed25519 PLANTED",)),
    )


@pytest.fixture
async def links():
    return FakeLinks()


@pytest.fixture
async def host(links: FakeLinks, tmp_path: Path):
    fake = (await FakeHost.open("h", tmp_path)).join(links)
    yield fake
    await fake.close()


async def running_vm(links: FakeLinks, tmp_path: Path) -> None:
    answer = await links.ensure("h", image_wanted())
    assert isinstance(answer, Running)
    for content in (KERNEL, ROOT):
        assert sha256(content) in answer.needs
        (tmp_path / "file").write_bytes(content)
        await links.upload("h", tmp_path / "file", sha256(content))
    assert isinstance(await links.ensure("h", image_wanted()), Succeeded)
    assert isinstance(await links.ensure("h", volume_wanted()), Succeeded)
    assert isinstance(await links.ensure("h", vm_wanted()), Succeeded)


async def state_of(links: FakeLinks, kind: str = "vm", object_id: str = VM) -> str:
    observed = await links.observe("h", kind, object_id)
    return observed.state if observed else "none"


async def test_a_vm_lives_and_leaves_nothing(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    assert await state_of(links) == "running"
    assert host.network.links
    for kind, object_id in (("vm", VM), ("volume", "vol_1"), ("image", "img_1")):
        assert isinstance(await links.purge("h", kind, object_id, ONE), Succeeded)
        assert isinstance(await links.purge("h", kind, object_id, ONE), Succeeded), "absent is success"
    assert await host.leftovers() == []
    assert not host.network.links
    remaining = [path for path in host.agent.paths.state.rglob("*") if path.is_file()]
    assert {path.parent.parent.name for path in remaining if path.suffix == ".json"} == {"tombstones"}


async def test_a_purged_generation_never_comes_back(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    await links.purge("h", "vm", VM, TWO)
    for late in (ONE, TWO):
        with pytest.raises(AgentError) as caught:
            await links.ensure("h", vm_wanted(late))
        assert (caught.value.code, caught.value.retryable) == ("generation.purged", False)
    assert isinstance(await links.ensure("h", vm_wanted(THREE)), Succeeded)
    assert await state_of(links) == "running"


async def test_an_epoch_beats_every_number(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    assert isinstance(await links.ensure("h", vm_wanted(Generation(epoch=2, number=0))), Succeeded)
    with pytest.raises(AgentError, match=r"generation\.former_epoch"):
        await links.ensure("h", vm_wanted(Generation(epoch=1, number=99)))


async def test_what_a_restored_control_plane_replaced_is_not_heard_about_anything(
    host: FakeHost, links: FakeLinks, tmp_path: Path
):
    """Also not about objects that the restored one has not spoken of yet, nor after the agent's restart."""
    await running_vm(links, tmp_path)
    await links.purge("h", "image", "img_other", Generation(epoch=2, number=1))
    again = await FakeHost.open("h", tmp_path)
    for agent in (host, again):
        links.add("h", agent.answer)
        with pytest.raises(AgentError, match=r"generation\.former_epoch"):
            await links.ensure("h", vm_wanted(Generation(epoch=1, number=99)))
        with pytest.raises(AgentError, match=r"generation\.former_epoch"):
            await links.purge("h", "vm", VM, Generation(epoch=1, number=99))
    assert (await links.observe("h", "vm", VM)) is not None


async def test_older_or_different_documents_are_refused(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    await links.ensure("h", vm_wanted(TWO))
    with pytest.raises(AgentError, match=r"generation\.stale"):
        await links.ensure("h", vm_wanted(ONE))
    with pytest.raises(AgentError, match=r"generation\.conflict"):
        await links.ensure("h", replace(vm_wanted(TWO), vcpus=2))
    with pytest.raises(AgentError, match=r"generation\.stale"):
        await links.purge("h", "vm", VM, ONE)


async def test_power_and_restart_are_fields(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    first = host.supervisor.units[f"fakevm-{VM}"].incarnation
    await links.ensure("h", replace(vm_wanted(TWO), restart_generation=1))
    second = host.supervisor.units[f"fakevm-{VM}"].incarnation
    assert first != second
    await links.ensure("h", replace(vm_wanted(TWO), restart_generation=1))
    assert host.supervisor.units[f"fakevm-{VM}"].incarnation == second, "restarted once"
    await links.ensure("h", replace(vm_wanted(THREE), restart_generation=1, power="stopped"))
    assert await state_of(links) == "absent"
    await links.ensure("h", replace(vm_wanted(Generation(epoch=1, number=4)), restart_generation=1))
    assert await state_of(links) == "running"


async def test_a_changed_machine_says_that_it_needs_a_restart(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    await links.ensure("h", replace(vm_wanted(TWO), vcpus=2))
    observed = await links.observe("h", "vm", VM)
    assert observed is not None
    assert observed.detail["restart_needed"] is True


@pytest.mark.parametrize(("policy", "state"), [("stop", "stopped"), ("restart", "running")])
async def test_a_guest_that_powers_off(host: FakeHost, links: FakeLinks, tmp_path: Path, policy: str, state: str):
    await running_vm(links, tmp_path)
    document = replace(vm_wanted(TWO), on_guest_poweroff=policy)
    await links.ensure("h", document)
    host.supervisor.die(f"fakevm-{VM}", exit_code=0)
    await host.look()
    assert await state_of(links) == state
    await links.ensure("h", document)
    assert await state_of(links) == state, "asking again changes nothing"
    host.supervisor.reboot()
    await host.look()
    assert (await state_of(links) == "running") == (policy == "restart"), "the guest's wish survives a reboot"
    await links.ensure("h", replace(document, generation=THREE))
    assert await state_of(links) == "running", "a newer document starts it"


async def test_a_killed_machine_comes_back(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    host.supervisor.die(f"fakevm-{VM}")
    assert await state_of(links) == "stopped"
    await host.look()
    assert await state_of(links) == "running"


async def test_what_is_used_is_not_purged(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    for kind, object_id in (("volume", "vol_1"), ("image", "img_1")):
        result = await links.purge("h", kind, object_id, ONE)
        assert isinstance(result, Failed)
        assert (result.code, result.retryable) == (f"{kind}.in_use", True)


async def test_long_work_answers_running_and_its_end_is_an_event(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    await links.purge("h", "vm", VM, ONE)
    host.agent.settle_seconds = 0.05
    host.faults.hold("machine.apply")
    assert await links.ensure("h", vm_wanted(TWO)) == Running(step="start")
    assert await links.ensure("h", vm_wanted(TWO)) == Running(step="start")
    cursor = host.agent.events.cursor
    host.faults.release("machine.apply")
    (event,) = await host.agent.events.wait(cursor)
    assert (event.event, event.body["result"]) == ("object.settled", "succeeded")
    assert isinstance(await links.ensure("h", vm_wanted(TWO)), Succeeded)


async def test_a_failure_is_handed_out_once_and_tried_again(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    host.faults.fail("storage.apply", AgentError("disk.full", "no space left"))
    result = await links.ensure("h", volume_wanted(TWO, 2 << 20))
    assert isinstance(result, Failed)
    assert result.code == "disk.full"
    assert isinstance(await links.ensure("h", volume_wanted(TWO, 2 << 20)), Succeeded)


async def test_a_purge_ends_an_ensure_that_still_runs(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    host.agent.settle_seconds = 0.05
    host.faults.hold("machine.apply")
    await links.ensure("h", replace(vm_wanted(TWO), restart_generation=1))
    assert isinstance(await links.purge("h", "vm", VM, TWO), Succeeded)
    host.faults.release("machine.apply")
    assert "vm" not in {line.split()[0] for line in await host.leftovers()}


async def test_unknown_objects_are_reported_and_kept(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    host.agent.documents.drop("vm", VM)
    objects = {item.id: item for item in (await links.observe_host("h")).objects}
    assert (objects[VM].state, objects[VM].generation) == ("unknown", None)
    await host.look()
    assert host.supervisor.units[f"fakevm-{VM}"].state == "running"


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../b", "", "a//b", "./a"])
async def test_file_names_stay_inside(host: FakeHost, links: FakeLinks, name: str):
    wanted = replace(image_wanted(), files=(FileWanted(name=name, sha256="0" * 64, size_bytes=1),))
    with pytest.raises(AgentError, match=r"image\.invalid"):
        await links.ensure("h", wanted)


@pytest.mark.parametrize("object_id", ["../../etc", "a/b", "", ".", "x" * 80])
async def test_ids_stay_inside(host: FakeHost, links: FakeLinks, object_id: str):
    with pytest.raises(AgentError, match=r"request\.invalid"):
        await links.ensure("h", replace(image_wanted(), id=object_id))


async def test_boot_files_and_bases_are_the_images_own(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    outside = host.agent.paths.state / "images" / "outside"
    outside.write_bytes(b"another's")
    boot = KernelBoot(kernel_file="../outside", initramfs_file="", cmdline="")
    result = await links.ensure("h", replace(vm_wanted(TWO), boot=boot, restart_generation=1))
    assert isinstance(result, Failed)
    assert result.code == "image.missing"
    result = await links.ensure("h", replace(volume_wanted(TWO), image_file="../outside"))
    assert isinstance(result, Failed)
    assert result.code == "image.missing"


async def test_secrets_are_sealed_at_rest(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    for path in host.agent.paths.state.rglob("*"):
        if path.is_file():
            assert b"PLANTED" not in path.read_bytes(), path
    assert host.agent.paths.host_key.stat().st_mode & 0o777 == 0o600


async def test_documents_are_read_again(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    again = await FakeHost.open("h", tmp_path)
    assert again.agent.documents.get("vm", VM) == vm_wanted()
    key = again.agent.paths.host_key
    key.write_bytes(bytes(32))
    broken = await FakeHost.open("h", tmp_path)
    assert broken.agent.documents.get("vm", VM) is None
    assert ("vm", VM) in broken.agent.documents.broken
    assert any(line == f"vm {VM} broken" for line in await broken.leftovers())


async def test_a_crashing_machine_is_tried_ever_more_slowly(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    now = 1000.0
    host.agent.monotonic = lambda: now
    keeper = Keeper(host.agent, Metrics())
    await keeper.sweep()
    starts = []
    for second in range(120):
        now = 1000.0 + second
        if (await host.supervisor.observe(f"fakevm-{VM}")).state == "running" and second:
            starts.append(second)
        host.supervisor.die(f"fakevm-{VM}")
        await keeper.look(("vm", VM))
        job = host.agent.jobs.current(("vm", VM))
        if job is not None:
            await host.agent.jobs.wait(job, 5)
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert gaps == sorted(gaps)
    assert 4 <= len(starts) <= 9
    keeper.close()


async def test_a_damaged_link_is_mended_and_a_lost_one_reported(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    (name,) = host.network.links
    host.network.links[name] = replace(host.network.links[name], is_complete=False)
    await host.look()
    assert host.network.links[name].is_complete
    del host.network.links[name]
    await host.look()
    observed = await links.observe("h", "vm", VM)
    assert observed is not None
    assert (observed.state, observed.detail["links_missing"]) == ("running", 1)


async def test_a_machine_whose_start_was_cut_is_given_to_its_driver_again(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    records = host.agent.records
    cut = records.get(VM)
    assert cut is not None
    assert not cut.is_starting
    records.put(VM, replace(cut, is_starting=True))  # what an agent leaves that dies between the process and its first breath
    host.faults.passed.clear()
    await host.look()
    assert ("machine.apply", VM) in host.faults.passed, "only the driver knows whether the machine really runs"
    await host.look()
    assert host.faults.passed.count(("machine.apply", VM)) == 1
    again = records.get(VM)
    assert again is not None
    assert not again.is_starting


async def test_an_object_that_cannot_be_looked_at_hides_no_other(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    host.faults.fail("storage.observe", AgentError("volume.damaged", "no qcow2 file", retryable=False))
    seen = {item.id: item for item in (await links.observe_host("h")).objects}
    assert seen["vol_1"].state == "unobservable"
    assert "volume.damaged" in str(seen["vol_1"].detail["reason"])
    assert seen[VM].state == "running"


async def test_work_cancelled_before_it_began_blocks_nobody(host: FakeHost):
    jobs, key = host.agent.jobs, ("vm", VM)

    async def work(job: Job) -> Result:
        del job
        return Succeeded(observed={})

    jobs.start(key, "ensure", ONE, work)
    await jobs.cancel(key)
    assert isinstance(await jobs.wait(jobs.start(key, "ensure", TWO, work), 5), Succeeded)


@pytest.mark.caps("root")
async def test_what_the_agent_believes_of_a_machine_is_not_the_machines_to_write(
    host: FakeHost, links: FakeLinks, tmp_path: Path
):
    await running_vm(links, tmp_path)
    assert host.agent.paths.vm_directory(VM).stat().st_uid == os.geteuid()
    assert host.agent.paths.vm_run_directory(VM).stat().st_uid == host.agent.records.uid(VM)
