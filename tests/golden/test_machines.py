"""What the machine and storage drivers render, word for word: a change of an argument must be seen in review."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hostagent.drivers.machine.cloud_hypervisor import CloudHypervisorMachine
from hostagent.drivers.machine.cloud_hypervisor_config import net_config, vm_config
from hostagent.drivers.machine.cloud_hypervisor_program import Program
from hostagent.drivers.machine.container import ContainerMachine
from hostagent.drivers.machine.protocol import DiskAttachment, MachinePlan, MountAttachment, NicAttachment
from hostagent.drivers.machine.qemu import QemuMachine
from hostagent.drivers.machine.qemu_command import nic_words
from hostagent.drivers.machine.seed import render_seed, workload_text
from hostagent.drivers.network.links import LinkSet
from hostagent.drivers.network.protocol import LinkPlan, RoutePlan, interface_name, peer_name
from hostagent.drivers.network.routes import RouteSet
from hostagent.drivers.storage.layers import Layer, Layers
from hostagent.drivers.storage.protocol import VolumePlan
from hostagent.drivers.storage.qsd import QsdStorage
from hostagent.drivers.storage.qsd_graph import export, graph
from hostagent.drivers.supervisor.fake import FakeSupervisor
from hostagent.drivers.supervisor.protocol import UnitLimits, UnitWanted
from hostagent.drivers.supervisor.systemd import SystemdSupervisor, observed_from
from hostagent.lib.paths import Paths
from hostagent.protocol.errors import AgentError
from hostagent.protocol.wanted import (
    DiskWanted,
    FirmwareBoot,
    Generation,
    KernelBoot,
    MountWanted,
    NetworkWanted,
    NicWanted,
    RouteWanted,
    SeedWanted,
    VmWanted,
    VolumeWanted,
    WorkloadWanted,
)

ONE = Generation(epoch=1, number=1)
PATHS = Paths()
VM, VOLUME = "vm_01hf7yat000000000000000000", "vol_01hf7yat000000000000000000"
UID = 2013265920
NIC = NicWanted(
    id="nic_01hf7yat000000000000000000",
    generation=ONE,
    mac="06:00:00:00:00:01",
    ipv4="10.1.2.3",
    ipv6="fd00::3",
    mtu_bytes=1420,
)
SEED = SeedWanted(hostname="web-1", ssh_authorized_keys=("ssh-ed25519 AAAA someone",), nameservers=("192.0.2.53",))
WANTED = VmWanted(
    id=VM,
    generation=ONE,
    driver="qemu",
    vcpus=2,
    memory_bytes=512 << 20,
    image_id="img_1",
    boot=KernelBoot(kernel_file="vmlinux", initramfs_file="initramfs.cpio", cmdline="console=ttyS0 root=/dev/vda rw"),
    disks=(DiskWanted(volume_id=VOLUME, is_boot=True),),
    nics=(NIC,),
    seed=SEED,
)
PLAN = MachinePlan(
    vm=WANTED,
    disks=(
        DiskAttachment(
            volume_id=VOLUME,
            transport="vhost_user_blk",
            path=PATHS.volume_run_directory(VOLUME) / "disk.sock",
            is_boot=True,
            num_queues=2,
        ),
    ),
    nics=(NicAttachment(nic=NIC, interface=interface_name(NIC.id), kind="tap"),),
    image_directory=PATHS.image_directory("img_1"),
    run_directory=PATHS.vm_run_directory(VM),
    state_directory=PATHS.vm_directory(VM),
    log_path=PATHS.vm_log(VM),
    uid=UID,
    gid=UID,
    uid_count=65_536,
    cpus=(2, 3),
    seed=render_seed(VM, SEED, (NIC,)),
)
WORKLOAD = WorkloadWanted(
    argv=("/usr/bin/engine", "--port", "8000"), env={"THREADS": "2"}, secret_env={"TOKEN": "planted"}, port=8000
)
CONTAINER_PLAN = dataclasses.replace(
    PLAN,
    vm=dataclasses.replace(WANTED, driver="container", boot=None, disks=(), workload=WORKLOAD),
    disks=(),
    nics=(NicAttachment(nic=NIC, interface=interface_name(NIC.id), kind="veth", peer=peer_name(NIC.id)),),
    mounts=(MountAttachment(source=PATHS.image_directory("img_2"), path="/weights"),),
)
VM_WORKLOAD_PLAN = dataclasses.replace(
    PLAN,
    vm=dataclasses.replace(
        WANTED,
        workload=dataclasses.replace(WORKLOAD, root_image_id="img_2", mounts=(MountWanted(image_id="img_3", path="/w"),)),
    ),
    root=MountAttachment(source=PATHS.image_disks / "a.ext4", path="/", form="disk"),
    mounts=(MountAttachment(source=PATHS.image_disks / "b.ext4", path="/w", form="disk"),),
)


def lines(argv: tuple[str, ...]) -> str:
    """One option with its value a line."""
    text = ""
    for word in argv:
        text += f"\n{word}" if word.startswith("-") or not text else f" {word}"
    return text.strip() + "\n"


def qemu() -> QemuMachine:
    return QemuMachine(FakeSupervisor(), PATHS, tsc_khz=2_300_000, kvm_groups=lambda: (104,))


def test_a_vm_by_tcg(golden):
    rendered = qemu().render(PLAN)

    (unit,) = rendered.units
    words = "".join(f"{command} {json.dumps(arguments)}\n" for command, arguments in nic_words(0, NIC, "tap0"))
    golden("qemu-tcg.txt", f"{unit.name} uid={unit.uid} groups={unit.groups} {unit.limits}\n{lines(unit.argv)}{words}")
    assert [(str(file.path), file.is_secret) for file in rendered.files] == [(f"/run/bedplate/vm/{VM}/seed.img", True)]
    assert qemu().render(PLAN) == rendered


def microvm(*, has_landlock: bool = True) -> CloudHypervisorMachine:
    program = Program(paths=PATHS, fixed=Path("/opt/bedplate/cloud-hypervisor/0/cloud-hypervisor"))
    return CloudHypervisorMachine(
        FakeSupervisor(), PATHS, program, has_landlock=has_landlock, kvm_groups=lambda: (104,), python="/usr/bin/python3"
    )


def test_a_microvm(golden):
    plan = dataclasses.replace(VM_WORKLOAD_PLAN, is_kvm_usable=True)
    rendered = microvm().render(plan)

    text = "".join(f"{unit.name} uid={unit.uid} {unit.groups} {unit.limits}\n{lines(unit.argv)}" for unit in rendered.units)
    golden(
        "microvm.txt", text + json.dumps(vm_config(plan, has_landlock=True), indent=1) + "\n" + json.dumps(net_config(0, NIC))
    )
    (seed,) = rendered.files
    assert b"planted" in seed.content
    assert seed.is_secret
    assert "planted" not in str(rendered.units)


def test_a_vm_with_a_workload_gets_its_images_as_disks_that_are_only_read(golden):
    rendered = qemu().render(VM_WORKLOAD_PLAN)

    (unit,) = rendered.units
    (seed,) = rendered.files
    golden("qemu-workload.txt", lines(unit.argv) + workload_text(VM_WORKLOAD_PLAN.vm.workload))
    assert b"planted" in seed.content
    assert seed.is_secret
    assert "planted" not in str(unit)


def test_a_directory_is_no_disk():
    plan = dataclasses.replace(VM_WORKLOAD_PLAN, mounts=CONTAINER_PLAN.mounts)
    with pytest.raises(AgentError) as refused:
        qemu().render(plan)
    assert refused.value.code == "vm.unsupported"


def test_a_vm_by_kvm_and_firmware(golden):
    wanted = dataclasses.replace(WANTED, boot=FirmwareBoot(firmware_file="OVMF.fd"))
    (unit,) = qemu().render(dataclasses.replace(PLAN, vm=wanted, is_kvm_usable=True)).units

    assert unit.groups == (104,)
    golden("qemu-kvm-firmware.txt", lines(unit.argv))


@pytest.mark.parametrize("change", [{"boot": None}, {"workload": WORKLOAD}])
def test_what_qemu_cannot_do_is_refused_for_good(change):
    with pytest.raises(AgentError) as refused:
        qemu().render(dataclasses.replace(PLAN, vm=dataclasses.replace(WANTED, **change)))
    assert (refused.value.code, refused.value.retryable) == ("vm.unsupported", False)


def test_a_container(golden):
    driver = ContainerMachine(FakeSupervisor(), PATHS, python="/usr/bin/python3", code=Path("/opt/bedplate/agent.pyz"))
    rendered = driver.render(CONTAINER_PLAN)

    (unit,) = rendered.units
    config = json.loads(rendered.files[0].content)
    golden("container.txt", f"{unit.argv} {unit.env}\n{json.dumps(config, indent=1)}\n")
    secret = [file for file in rendered.files if b"planted" in file.content]
    assert [(file.path.name, file.is_secret) for file in secret] == [("config.json", True)]
    assert "planted" not in str(unit)


def test_a_container_without_a_command_is_refused():
    driver = ContainerMachine(FakeSupervisor(), PATHS)
    with pytest.raises(AgentError) as refused:
        driver.render(dataclasses.replace(CONTAINER_PLAN, vm=dataclasses.replace(CONTAINER_PLAN.vm, workload=None)))
    assert refused.value.code == "vm.unsupported"


def test_a_volume(golden):
    plan = VolumePlan(
        volume=VolumeWanted(id=VOLUME, generation=ONE, size_bytes=4 << 30, num_queues=2),
        directory=PATHS.volume_directory(VOLUME),
        run_directory=PATHS.volume_run_directory(VOLUME),
        log_path=PATHS.log / "volume.log",
        base=PATHS.image_directory("img_1") / "root.raw",
        uid=UID,
        gid=UID,
    )
    rendered = QsdStorage(FakeSupervisor(), PATHS).render(plan)

    assert rendered.unit is not None
    stored = Layers(
        layers=(Layer(file="disk.qcow2", key_id=VOLUME), Layer(file="disk.1.qcow2", key_id=VOLUME)), base_format="raw"
    )
    words = (*graph(plan.volume, plan.directory, stored), export(plan.volume, plan.run_directory, plan.transport))
    golden("volume.txt", lines(rendered.unit.argv) + "".join(f"{name} {json.dumps(body)}\n" for name, body in words))


def test_links_and_routes(golden):
    tap = LinkPlan(nic=NIC, kind="tap", interface=interface_name(NIC.id), uid=UID)
    veth = LinkPlan(nic=NIC, kind="veth", interface=interface_name(NIC.id), peer=peer_name(NIC.id))
    routes = NetworkWanted(id="routes", generation=ONE, routes=(RouteWanted(destination_cidr="10.1.2.4/32", via="192.0.2.2"),))
    requests = (
        *LinkSet().render(tap).requests,
        *LinkSet().render(veth).requests[:1],
        *RouteSet().render(RoutePlan(wanted=routes, data_interface="eth1")).requests,
    )

    golden("links.txt", "".join(f"{verb} {' '.join(f'{k}={v}' for k, v in attributes)}\n" for verb, attributes in requests))


def test_a_unit_under_systemd(golden):
    unit = UnitWanted(
        name=f"vm-{VM}",
        argv=("/usr/bin/program", "--price", "$5"),
        env={"A": "b"},
        uid=UID,
        gid=UID,
        groups=(104,),
        log_path=Path("/var/log/bedplate/x.log"),
        limits=UnitLimits(cpu_cores=2.5, memory_bytes=1 << 30, cpus=(2, 3), tasks=300, locked_memory_bytes=1 << 31),
    )

    golden("systemd.txt", lines(SystemdSupervisor().render(unit).argv))


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("LoadState=not-found\nActiveState=inactive\n", None),
        ("LoadState=loaded\nActiveState=active\nMainPID=0\nExecMainCode=1\nExecMainStatus=0\n", ("exited", 0, None)),
        ("LoadState=loaded\nActiveState=failed\nMainPID=0\nExecMainCode=1\nExecMainStatus=3\n", ("exited", 3, None)),
        ("LoadState=loaded\nActiveState=failed\nMainPID=0\nExecMainCode=2\nExecMainStatus=9\n", ("exited", None, 9)),
    ],
)
def test_how_systemd_says_a_unit_ended(shown, expected):
    observed = observed_from("vm-1", shown)

    assert (observed and (observed.state, observed.exit_code, observed.exit_signal)) == expected
