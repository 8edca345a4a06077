"""What a host does when something of a machine is lost, or is not wanted any more: disk, image, nic, record, program."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane.remote.fake import FakeLinks
from hostagent.protocol.errors import AgentError
from hostagent.protocol.results import Succeeded
from hostagent.protocol.wanted import FileWanted, ImageWanted
from hostagent.verbs.records import Records
from tests.agent.test_verbs import KERNEL, ONE, THREE, TWO, VM, running_vm, sha256, state_of, vm_wanted
from tests.fakehost import FakeHost


@pytest.fixture
async def links():
    return FakeLinks()


@pytest.fixture
async def host(links: FakeLinks, tmp_path: Path):
    fake = (await FakeHost.open("h", tmp_path)).join(links)
    yield fake
    await fake.close()


async def test_a_machine_whose_disk_or_image_is_lost_can_be_stopped(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    host.agent.documents.drop("volume", "vol_1")
    shutil.rmtree(host.agent.paths.image_directory("img_1"))
    answer = await links.ensure("h", replace(vm_wanted(TWO), power="stopped"))
    assert isinstance(answer, Succeeded), answer
    assert await state_of(links) != "running"


async def test_links_that_a_newer_document_has_no_more_go_with_the_next_stop(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    assert len(host.network.links) == 1
    assert isinstance(await links.ensure("h", replace(vm_wanted(TWO), nics=())), Succeeded)
    assert len(host.network.links) == 1, "the machine that runs has it still"
    assert isinstance(await links.ensure("h", replace(vm_wanted(THREE), nics=(), restart_generation=1)), Succeeded)
    assert not host.network.links


async def test_links_that_a_newer_document_has_no_more_go_with_their_machine(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    assert isinstance(await links.ensure("h", replace(vm_wanted(TWO), nics=())), Succeeded)
    assert isinstance(await links.purge("h", "vm", VM, TWO), Succeeded)
    assert not host.network.links


@pytest.mark.caps("root")
async def test_a_record_that_cannot_be_read_keeps_its_uids(host: FakeHost, links: FakeLinks, tmp_path: Path):
    """Its machine may run: nobody else gets its range, and it is not started anew for the loss of a file."""
    await running_vm(links, tmp_path)
    agent = host.agent
    uid = agent.records.uid(VM)
    (agent.paths.vm_directory(VM) / "record.json").write_bytes(b"{half")
    agent.records = Records(agent.paths, agent.config.uid_base)
    assert agent.records.broken == {VM}
    assert agent.records.uid("vm_2") != uid
    assert agent.records.uid(VM) == uid
    host.faults.passed.clear()
    assert isinstance(await links.ensure("h", replace(vm_wanted(TWO), restart_generation=7)), Succeeded)
    assert ("machine.apply", VM) not in host.faults.passed
    record = Records(agent.paths, agent.config.uid_base).get(VM)
    assert record is not None
    assert record.restarted == 7


async def test_an_artifact_that_is_purged_leaves_no_program(host: FakeHost, links: FakeLinks, tmp_path: Path):
    file = FileWanted(name="tool", sha256=sha256(KERNEL), size_bytes=len(KERNEL))
    wanted = ImageWanted(id="tool", generation=ONE, purpose="artifact", files=(file,))
    await links.ensure("h", wanted)
    (tmp_path / "file").write_bytes(KERNEL)
    await links.upload("h", tmp_path / "file", file.sha256)
    assert isinstance(await links.ensure("h", wanted), Succeeded)
    assert (host.agent.paths.programs / "tool" / file.sha256 / "tool").stat().st_mode & 0o111
    assert isinstance(await links.purge("h", "image", "tool", ONE), Succeeded)
    assert list(host.agent.paths.programs.iterdir()) == []
    with pytest.raises(AgentError, match="reserved"):  # that is where the agent itself lies
        await links.ensure("h", replace(wanted, id="agent"))
