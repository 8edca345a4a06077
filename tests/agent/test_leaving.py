"""A machine that is stopped by us: its load balancers know before its guest does, and forget it when it runs again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane.remote.fake import FakeLinks
from hostagent.lib.wait import until
from hostagent.protocol.network import BackendWanted, ListenerWanted, LoadBalancerWanted
from hostagent.protocol.results import Succeeded
from hostagent.protocol.wanted import Generation, VmWanted
from hostagent.serve.keeper import Keeper
from hostagent.serve.metrics import Metrics
from tests.agent.test_verbs import ONE, THREE, TWO, VM, running_vm, vm_wanted
from tests.fakehost import FakeHost

NIC = vm_wanted().nics[0]
BALANCER = LoadBalancerWanted(
    id="lb_000000000001",
    generation=ONE,
    vips=("203.0.113.1",),
    listeners=(ListenerWanted(protocol="tcp", port=80, target_port=80),),
    backends=(
        BackendWanted(id="here", ipv4=NIC.ipv4, nic_id=NIC.id),
        BackendWanted(id="elsewhere", ipv4="10.0.0.9", nic_id="nic_000000000009"),
    ),
)


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param(replace(vm_wanted(TWO), power="stopped"), id="stop"),
        pytest.param(replace(vm_wanted(TWO), restart_generation=1), id="restart"),
        pytest.param(None, id="purge"),
    ],
)
async def test_it_gets_no_new_flows_before_it_is_told_to_stop(tmp_path: Path, ending: VmWanted | None):
    links = FakeLinks()
    host = (await FakeHost.open("h", tmp_path)).join(links)
    keeper = Keeper(host.agent, Metrics())
    try:
        await running_vm(links, tmp_path)
        assert isinstance(await links.ensure("h", BALANCER), Succeeded)
        await keeper.look(("vm", VM))
        service = host.agent.balancers.services[BALANCER.id]
        assert set(service.tables[4]) == {"here", "elsewhere"}
        point = "machine.remove" if ending is None else "machine.apply"
        host.faults.hold(point)
        host.faults.passed.clear()
        asked = asyncio.create_task(links.purge("h", "vm", VM, TWO) if ending is None else links.ensure("h", ending))

        async def is_being_stopped() -> bool:
            return (point, VM) in host.faults.passed

        assert await until(is_being_stopped, seconds=10)
        assert set(service.tables[4]) == {"elsewhere"}
        assert service.words()["here"] == "leaving"
        await keeper.look(("vm", VM))
        assert service.words()["here"] == "leaving", "it still runs, and goes all the same"
        host.faults.release(point)
        await asked
        if ending is not None and ending.power == "running":
            await keeper.look(("vm", VM))
        else:
            again = vm_wanted(THREE if ending else Generation(epoch=1, number=4))
            assert isinstance(await links.ensure("h", again), Succeeded)
            await keeper.look(("vm", VM))
        await host.agent.balancers.take(BALANCER)
        assert service.words()["here"] == "up"
        assert set(service.tables[4]) == {"here", "elsewhere"}
    finally:
        keeper.close()
        await host.close()
