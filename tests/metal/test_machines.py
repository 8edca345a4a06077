"""A whole deployment on one server with systemd: a VM by nested KVM, limited by its unit, that outlives killing, an agent's
restart and a reboot of the server; a model served from another; nothing of it is left when the server is removed.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.embedded import showcase
from controlplane.embedded.stage import Stage
from controlplane.embedded.timeline import Timeline
from hostagent.drivers.machine.qemu import OVERHEAD_BYTES
from provisioning.lab.metal import MetalHost
from tests.metal.observing import snapshot
from tests.system.deployment import EMBEDDING_MODEL, MIB, Deployed, Json
from tests.system.enrolling import difference, eventually, fingerprint

pytestmark = [
    pytest.mark.metal,
    pytest.mark.thorough,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.caps("root", "qemu", "debootstrap"),
]
PATIENCE = 3.0  # everything there is emulated
VM_SECONDS = 180 * PATIENCE


class OnMetal(Deployed):
    """Logins come from the server that runs the VM."""

    metal: MetalHost

    def other(self, vm: Json) -> Any:
        del vm
        return self.metal


@pytest.fixture
async def deployed(metal: MetalHost) -> AsyncIterator[OnMetal]:
    """`bedplate up` and a guest image, no host."""
    directory = Path(tempfile.mkdtemp(prefix="bedplate-vmt-"))
    directory.chmod(0o711)
    stage = Stage(directory=directory, timeline=Timeline())
    key = directory / "vm-key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(key)], check=True)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(showcase.start_control_plane(stage))
            image = group.create_task(showcase.build_image(stage))
        await showcase.import_image(stage, image.result())
        await showcase.make_project(stage)
        made = OnMetal(stage=stage, lab=None, key=key, connect_seconds=20)  # type: ignore[arg-type] - no hosts made of namespaces here
        made.metal = metal
        yield made
    finally:
        keep = Path(os.environ.get("KEEP_TEST_LOGS", directory / "nowhere"))
        if keep.is_dir():
            shutil.copytree(stage.log_directory, keep / directory.name, dirs_exist_ok=True)
        await stage.close()
        shutil.rmtree(directory, ignore_errors=True)


async def enrol(deployed: OnMetal, metal: MetalHost) -> None:
    """As an operator does it, by the command line."""
    metal.authorize(await deployed.cli("host", "bootstrap-key"))
    words = ("--name", metal.name, "--host-key-fingerprint", fingerprint(metal), "--data-interface", "eth0", "--qemu-on-kvm")
    await deployed.cli("host", "add", f"root@{metal.address}", *words, seconds=240 * PATIENCE)
    await deployed.stage.api.until(f"/v1/hosts/{metal.name}", lambda host: host["link"] == "up", seconds=60 * PATIENCE)


def unit_of(metal: MetalHost, vm: Json) -> dict[str, str]:
    """The VM's transient unit as systemd shows it."""
    names = "MainPID,ControlGroup,Slice,Transient,ActiveState"
    shown = metal.exec(["systemctl", "show", f"bedplate-vm-{vm['id']}.service", f"--property={names}"]).stdout.decode()
    return dict(line.split("=", 1) for line in shown.splitlines())


def limits_of(metal: MetalHost, group: str) -> dict[str, str]:
    names = ("memory.max", "cpu.max", "pids.max", "cgroup.procs")
    script = f"cd /sys/fs/cgroup{group} && head -n 100 {' '.join(names)}"
    shown = metal.exec(["sh", "-c", script]).stdout.decode()
    return {
        part.partition(" <==")[0].strip(): part.partition("<==\n")[2].strip() for part in shown.split("==>") if part.strip()
    }


def limited(metal: MetalHost, vm: Json) -> dict[str, str]:
    """The VM's unit, having looked at what its VMM may use and who it is."""
    unit = unit_of(metal, vm)
    assert (unit["Slice"], unit["Transient"], unit["ActiveState"]) == ("bedplate.slice", "yes", "active")
    limits = limits_of(metal, unit["ControlGroup"])
    quota, period = (int(word) for word in limits["cpu.max"].split())
    assert quota == period * 2, "one for the VCPU, one for the VMM itself"
    assert int(limits["memory.max"]) == 384 * MIB + OVERHEAD_BYTES
    assert limits["pids.max"].isdigit()
    argv = metal.exec(["sh", "-c", f"tr '\\0' ' ' </proc/{unit['MainPID']}/cmdline"]).stdout.decode()
    assert "accel=kvm" in argv
    status = metal.exec(["cat", f"/proc/{unit['MainPID']}/status"]).stdout.decode()
    uids = next(line.split()[1:] for line in status.splitlines() if line.startswith("Uid:"))
    assert "0" not in uids, "a user of its own"
    return unit


async def test_a_vm_lives_on_a_server_and_comes_back_after_its_reboot(deployed: OnMetal, metal: MetalHost) -> None:
    before = snapshot(metal)
    await enrol(deployed, metal)

    await deployed.create("one")
    vm = await deployed.until("one", "running", seconds=VM_SECONDS)
    first = await deployed.boot_of(vm, seconds=VM_SECONDS)
    unit = limited(metal, vm)

    metal.exec(["systemctl", "restart", "bedplate-agent.service"], timeout=120)
    assert unit_of(metal, vm)["MainPID"] == unit["MainPID"], "an agent's restart leaves machines alone"

    metal.exec(["kill", "-KILL", unit["MainPID"]])
    await asyncio.to_thread(_until_another_pid, metal, vm, unit["MainPID"])
    second = await deployed.another_boot(vm, first, seconds=VM_SECONDS)

    boot = metal.boot_id()
    metal.hang_up()
    await deployed.cli("host", "reboot", metal.name, "--yes", seconds=300 * PATIENCE)
    assert metal.await_boot(boot) != boot
    host = json.loads(await deployed.cli("host", "show", metal.name, "-o", "json"))
    assert host["state"] == "ready"
    vm = await deployed.until("one", "running", seconds=VM_SECONDS)
    await deployed.another_boot(vm, second, seconds=VM_SECONDS)
    limited(metal, vm)  # by KVM again: its module is there before the agent

    await deployed.delete("one", seconds=120 * PATIENCE)
    await serve_a_model(deployed)
    await deployed.cli("host", "remove", metal.name, "--yes", seconds=240 * PATIENCE)

    def left() -> dict[str, Any]:
        return {name: found for name, found in difference(before, snapshot(metal)).items() if not name.startswith("/root/")}

    await eventually(lambda: left() == {}, left, seconds=60 * PATIENCE)


async def serve_a_model(deployed: OnMetal) -> None:
    """By a replica in a VM: ready means that its engine has told the agent, from within the guest, which model it serves."""
    api, path = deployed.stage.api, f"/v1/projects/{showcase.PROJECT}/endpoints"
    await showcase.import_model(deployed.stage, EMBEDDING_MODEL)
    await api.post(path, {"name": "embeddings", "model": EMBEDDING_MODEL, "isolation": "vm"})
    seen = await api.until(f"{path}/embeddings", lambda seen: seen["status"] == "ready", seconds=2 * VM_SECONDS)
    (replica,) = seen["replicas"]
    assert (replica["isolation"], replica["driver"], replica["accelerator"]) == ("vm", "qemu", "kvm")
    assert "emulated" not in seen["observed"]["isolation_reason"]
    assert f"serving {EMBEDDING_MODEL}" in await deployed.cli("endpoint", "logs", "embeddings", "--tail", "1M", seconds=180)
    await deployed.cli("endpoint", "delete", "embeddings", "--yes", seconds=120 * PATIENCE)


def _until_another_pid(metal: MetalHost, vm: Json, pid: str) -> None:
    for _ in range(60):
        found = unit_of(metal, vm)
        if found["ActiveState"] == "active" and found["MainPID"] not in ("0", pid):
            return
    raise AssertionError(f"the VMM was not started again: {found}")
