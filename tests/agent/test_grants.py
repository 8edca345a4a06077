"""Grants of movable machines, on a clock of the test's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from controlplane.remote.fake import FakeLinks
from hostagent.protocol.errors import AgentError
from hostagent.protocol.results import Failed, Succeeded
from hostagent.protocol.verbs import Grant
from hostagent.serve.keeper import Keeper
from hostagent.serve.metrics import Metrics
from hostagent.verbs.grants import Grants
from tests.agent.test_verbs import TWO, VM, host, links, running_vm, state_of, vm_wanted
from tests.fakehost import FakeHost

__all__ = ["host", "links"]


async def test_a_movable_machine_needs_a_grant(host: FakeHost, links: FakeLinks, tmp_path: Path):
    await running_vm(links, tmp_path)
    document = replace(vm_wanted(TWO), home="movable", restart_generation=1)
    result = await links.ensure("h", document)
    assert isinstance(result, Failed)
    assert (result.code, result.retryable) == ("vm.no_grant", True)
    assert await state_of(links) != "running"
    stamp = (await links.call("h", "vm.grant", Grant())).stamp
    await links.call("h", "vm.grant", Grant(ids=(VM,), stamp=stamp))
    assert isinstance(await links.ensure("h", document), Succeeded)


async def test_a_grant_counts_from_its_stamp_and_its_end_ends_the_machine(host: FakeHost, links: FakeLinks, tmp_path: Path):
    """Renewed every 10 s it runs on; one that comes late lasts no longer; without one the machine ends and stays down."""
    await running_vm(links, tmp_path)
    now = 1000.0
    host.agent.monotonic = lambda: now
    keeper = Keeper(host.agent, Metrics())
    stamp = (await links.call("h", "vm.grant", Grant())).stamp
    await links.call("h", "vm.grant", Grant(ids=(VM,), stamp=stamp))
    document = replace(vm_wanted(TWO), home="movable")
    assert isinstance(await links.ensure("h", document), Succeeded)
    for _ in range(9):
        now += 10
        stamp = (await links.call("h", "vm.grant", Grant(ids=(VM,), stamp=stamp))).stamp
        await keeper.look(("vm", VM))
        assert await state_of(links) == "running"
    now += 50  # the last stamp is 50 s old when this grant, held up on its way, arrives
    await links.call("h", "vm.grant", Grant(ids=(VM,), stamp=stamp))
    await keeper.look(("vm", VM))
    assert await state_of(links) == "running"
    now += 10.1
    await keeper.look(("vm", VM))
    assert await state_of(links) != "running"
    with pytest.raises(AgentError) as stale:
        await links.call("h", "vm.grant", Grant(ids=(VM,), stamp=stamp))
    assert stale.value.code == "vm.grant_stale"
    await keeper.look(("vm", VM))
    if (job := host.agent.jobs.current(("vm", VM))) is not None:
        await host.agent.jobs.wait(job, 5)
    assert await state_of(links) != "running", "it is not started without a grant"
    stamp = (await links.call("h", "vm.grant", Grant())).stamp
    await links.call("h", "vm.grant", Grant(ids=(VM,), stamp=stamp))
    assert isinstance(await links.ensure("h", document), Succeeded)
    assert await state_of(links) == "running"


async def test_grants_outlive_the_agent_and_not_the_boot(host: FakeHost, links: FakeLinks, tmp_path: Path):
    stamp = (await links.call("h", "vm.grant", Grant())).stamp
    await links.call("h", "vm.grant", Grant(ids=(VM,), stamp=stamp))
    paths, again = host.agent.paths, Grants()
    again.load(paths)
    assert again.holds(VM, host.agent.monotonic())
    (paths.run / "boot_id").write_text("another-boot")
    other = Grants()
    other.load(paths)
    assert not other.holds(VM, host.agent.monotonic())
    with pytest.raises(AgentError):
        await links.call("h", "vm.grant", Grant(ids=(VM,), stamp=stamp))
