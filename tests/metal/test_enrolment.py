"""Enrolment of a server with systemd: what it changes, what it learns, and that nothing of it is left afterwards."""

from __future__ import annotations

import pytest

from provisioning.host import zipapp
from provisioning.lab.metal import MetalHost
from tests.metal.observing import snapshot
from tests.system.enrolling import Deployment, difference, eventually, fingerprint

pytestmark = [
    pytest.mark.metal,
    pytest.mark.thorough,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.caps("root", "qemu", "debootstrap"),
]

FEATURES = ("cgroup_v2", "flowtable", "iommu", "nftables", "tun", "user_namespaces", "veth", "wireguard")
ACCELERATORS = (("1234", "11e8"), ("1b36", "0005"), ("8086", "10d3"))


async def test_a_server_is_added_repaired_and_removed_without_a_trace(deployment: Deployment, metal: MetalHost) -> None:
    await deployment.bootstrap(metal)
    before = snapshot(metal)
    operation, found = await deployment.preflight(metal)
    assert operation["state"] == "succeeded", operation
    assert found["fingerprint"] == fingerprint(metal)
    assert found["report"]["is_fit"], found["report"]["checks"]
    assert difference(before, snapshot(metal)) == {}, "preflight reads only"
    planned = {(change["kind"], change["subject"]) for change in found["changes"]}
    assert planned >= {("unit", "bedplate-agent.service"), ("user", "bedplate"), ("package", "runc"), ("package", "zstd")}

    operation, added = await deployment.add(metal)
    assert operation["state"] == "succeeded", operation
    assert {(change["kind"], change["subject"]) for change in added["changes"]} == planned, "the dry run tells the truth"
    assert added["observed"]["agent_version"] == zipapp.build().version
    assert added["state"] == "ready"
    facts = (await deployment.get(f"/v1/hosts/{metal.name}/inventory"))["facts"]
    assert facts["supervisor"] == "systemd"
    assert facts["kvm"] == {"device_present": True, "usable": True, "reason": ""}, "nested KVM boots a guest"
    lacking = [name for name in FEATURES if not facts["kernel_features"][name]]
    assert lacking == []
    devices = {(device["vendor_id"], device["device_id"]): device for device in facts["pci"]}
    groups = [devices[ids]["iommu_group"] for ids in ACCELERATORS]
    assert len({*groups, None}) == len(groups) + 1, "each alone in an IOMMU group"
    assert not [condition for condition in facts["conditions"] if condition.startswith(("not_limited", "unreadable"))]
    assert set(facts["machine_drivers"]) >= {"qemu", "container"}
    assert metal.exec(["systemctl", "is-enabled", "bedplate-agent.service"]).stdout == b"enabled\n"

    metal.exec(["sh", "-c", "systemctl disable --now -q bedplate-agent; rm /opt/bedplate/agent/current; userdel -f bedplate"])
    operation, repaired = await deployment.add(metal)
    assert operation["state"] == "succeeded", operation
    assert repaired["generation"] == 2
    assert metal.exec(["systemctl", "is-active", "bedplate-agent.service"]).stdout == b"active\n"

    assert (await deployment.remove(metal.name))["state"] == "succeeded"
    await eventually(
        lambda: difference(before, snapshot(metal)) == {}, lambda: difference(before, snapshot(metal)), seconds=180
    )
