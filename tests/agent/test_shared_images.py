"""Images that workloads share on a host: one disk a content, made once, kept while a machine stands on it."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.remote.fake import FakeLinks
from hostagent.drivers.machine.fake import FakeMachine
from hostagent.drivers.machine.imagedisk import MKE2FS
from hostagent.drivers.machine.protocol import MountAttachment
from hostagent.protocol.errors import AgentError
from hostagent.protocol.results import Failed, Running, Succeeded
from hostagent.protocol.wanted import FileWanted, Generation, ImageWanted, MountWanted, SeedWanted, VmWanted, WorkloadWanted
from tests.fakehost import FakeHost

pytestmark = pytest.mark.skipif(not Path(MKE2FS).exists(), reason="this machine lacks: mke2fs")
ONE = Generation(epoch=1, number=1)
WEIGHTS = {"model.bin": b"w" * 10_000, "deep/er.json": b"{}"}


def archive() -> bytes:
    """An engine's tree with what must not come through: a device, a set-uid program."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name, kind, data in (
            ("bin", tarfile.DIRTYPE, b""),
            ("bin/engine", tarfile.REGTYPE, b"#!"),
            ("null", tarfile.CHRTYPE, b""),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.size, entry.mode = kind, len(data), 0o4755
            entry.devmajor, entry.devminor = 1, 3
            tar.addfile(entry, io.BytesIO(data))
    return content.getvalue()


def image(image_id: str, contents: dict[str, bytes]) -> ImageWanted:
    files = tuple(
        FileWanted(name=name, sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data)) for name, data in contents.items()
    )
    return ImageWanted(id=image_id, generation=ONE, purpose="weights", files=files)


def machine(vm_id: str, *, weights: str = "img_weights") -> VmWanted:
    return VmWanted(
        id=vm_id,
        generation=ONE,
        driver="fake",
        vcpus=1,
        memory_bytes=1 << 28,
        image_id="",
        boot=None,
        disks=(),
        nics=(),
        seed=SeedWanted(hostname="one"),
        workload=WorkloadWanted(
            argv=("/bin/engine",), root_image_id="img_engine", mounts=(MountWanted(image_id=weights, path="/models"),)
        ),
    )


@pytest.fixture
def links() -> FakeLinks:
    return FakeLinks()


@pytest.fixture
async def host(links: FakeLinks, tmp_path: Path) -> AsyncIterator[FakeHost]:
    """A host whose machines take shared images as disks."""
    fake = (await FakeHost.open("h", tmp_path / "host")).join(links)
    fake.machine.traits = dataclasses.replace(FakeMachine.traits, mount_form="disk", max_mounts=3)
    yield fake
    await fake.close()


async def put(links: FakeLinks, tmp_path: Path, image_id: str, contents: dict[str, bytes]) -> None:
    wanted = image(image_id, contents)
    answer = await links.ensure("h", wanted)
    for sha256 in answer.needs if isinstance(answer, Running) else ():
        (tmp_path / "file").write_bytes(next(data for data in contents.values() if hashlib.sha256(data).hexdigest() == sha256))
        await links.upload("h", tmp_path / "file", sha256)
    assert isinstance(await links.ensure("h", wanted), Succeeded)


async def put_both(links: FakeLinks, tmp_path: Path) -> None:
    await put(links, tmp_path, "img_engine", {"root.tar": archive()})
    await put(links, tmp_path, "img_weights", WEIGHTS)


def inside(disk: Path, command: str) -> str:
    """What debugfs says; the disk is not mounted."""
    return subprocess.run(["/usr/sbin/debugfs", "-R", command, str(disk)], check=True, capture_output=True, text=True).stdout


@pytest.mark.caps("root")
async def test_machines_share_one_disk_a_content(host: FakeHost, links: FakeLinks, tmp_path: Path) -> None:
    await put_both(links, tmp_path)
    await put(links, tmp_path, "img_same", WEIGHTS)
    assert isinstance(await links.ensure("h", machine("vm_1")), Succeeded)
    made = {path.name: path.stat().st_mtime_ns for path in host.agent.paths.image_disks.iterdir()}
    assert isinstance(await links.ensure("h", machine("vm_2", weights="img_same")), Succeeded)
    assert {path.name: path.stat().st_mtime_ns for path in host.agent.paths.image_disks.iterdir()} == made
    assert len(made) == 2

    plan = host.machine.plans["vm_2"]
    assert plan.mounts == host.machine.plans["vm_1"].mounts
    (weights,), root = plan.mounts, plan.root
    assert isinstance(root, MountAttachment)
    assert (weights.path, weights.form, root.path) == ("/models", "disk", "/")
    assert weights.source.stat().st_mode & 0o777 == 0o444
    assert inside(weights.source, "cat /model.bin") == WEIGHTS["model.bin"].decode()
    assert inside(weights.source, "cat /deep/er.json") == "{}"
    names = inside(root.source, "ls -p /")
    assert "/bin/" in names
    assert "null" not in names
    assert "lost+found" not in names
    assert "Mode:  0755" in inside(root.source, "stat /bin/engine")
    subprocess.run(["/usr/sbin/e2fsck", "-fn", str(root.source)], check=True, capture_output=True)


@pytest.mark.caps("root")
async def test_a_shared_image_is_kept_while_a_machine_stands_on_it(host: FakeHost, links: FakeLinks, tmp_path: Path) -> None:
    await put_both(links, tmp_path)
    await put(links, tmp_path, "img_other", {"other": b"x"})
    for vm_id, weights in (("vm_1", "img_weights"), ("vm_2", "img_weights"), ("vm_3", "img_other")):
        assert isinstance(await links.ensure("h", machine(vm_id, weights=weights)), Succeeded)
    for vm_id in ("vm_1", "vm_2"):
        for image_id in ("img_engine", "img_weights"):
            refused = await links.purge("h", "image", image_id, ONE)
            assert isinstance(refused, Failed)
            assert (refused.code, refused.retryable) == ("image.in_use", True)
            assert refused.context["user"] in ("vm_1", "vm_2", "vm_3")
        assert isinstance(await links.purge("h", "vm", vm_id, ONE), Succeeded)
    disk = host.machine.plans["vm_3"].mounts[0].source
    assert isinstance(await links.purge("h", "image", "img_weights", ONE), Succeeded)
    assert disk.exists()
    assert len(list(host.agent.paths.image_disks.iterdir())) == 2
    for kind, name in (("vm", "vm_3"), ("image", "img_other"), ("image", "img_engine")):
        assert isinstance(await links.purge("h", kind, name, ONE), Succeeded)
    assert list(host.agent.paths.image_disks.iterdir()) == []
    assert await host.leftovers() == []


@pytest.mark.caps("root")
async def test_a_half_arrived_image_makes_no_disk(host: FakeHost, links: FakeLinks, tmp_path: Path) -> None:
    await put(links, tmp_path, "img_engine", {"root.tar": archive()})
    answer = await links.ensure("h", image("img_weights", WEIGHTS))
    assert isinstance(answer, Running)
    (tmp_path / "file").write_bytes(WEIGHTS["deep/er.json"])
    await links.upload("h", tmp_path / "file", hashlib.sha256(b"{}").hexdigest())
    failed = await links.ensure("h", machine("vm_1"))
    assert isinstance(failed, Failed)
    assert (failed.code, failed.retryable) == ("image.missing", True)
    assert len(list(host.agent.paths.image_disks.iterdir())) == 1, "the engine's, which is whole"
    await put(links, tmp_path, "img_weights", WEIGHTS)
    assert isinstance(await links.ensure("h", machine("vm_1")), Succeeded)


@pytest.mark.caps("root")
async def test_a_disk_that_was_not_finished_is_made_anew(host: FakeHost, links: FakeLinks, tmp_path: Path) -> None:
    """As an agent leaves it that was killed; and an archive that is none is said, and leaves nothing."""
    await put_both(links, tmp_path)
    assert isinstance(await links.ensure("h", machine("vm_1")), Succeeded)
    disk = host.machine.plans["vm_1"].mounts[0].source
    await links.purge("h", "vm", "vm_1", ONE)
    disk.unlink()
    disk.with_suffix(".new").mkdir()
    (disk.with_suffix(".new") / "disk").write_bytes(b"half")
    assert isinstance(await links.ensure("h", machine("vm_2")), Succeeded)
    assert inside(disk, "cat /deep/er.json") == "{}"
    assert not disk.with_suffix(".new").exists()

    await put(links, tmp_path, "img_broken", {"root.tar": b"no archive" * 100})
    wanted = machine("vm_3")
    assert wanted.workload
    broken = dataclasses.replace(wanted, workload=dataclasses.replace(wanted.workload, root_image_id="img_broken"))
    failed = await links.ensure("h", broken)
    assert isinstance(failed, Failed)
    assert not list(host.agent.paths.image_disks.glob("*.new"))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"argv": ()}, "vm.invalid"),
        ({"secret_env": {"A": "x\0y"}}, "vm.invalid"),
        ({"mounts": (MountWanted(image_id="a", path="models"),)}, "vm.invalid"),
        ({"mounts": (MountWanted(image_id="a", path="/"),)}, "vm.invalid"),
        ({"mounts": (MountWanted(image_id="a", path="/a/../b"),)}, "vm.invalid"),
        ({"mounts": (MountWanted(image_id="a", path="/a"), MountWanted(image_id="b", path="/a"))}, "vm.invalid"),
        ({"mounts": tuple(MountWanted(image_id="a", path=f"/{name}") for name in "abc")}, "vm.unsupported"),
        ({"root_image_id": ""}, "vm.unsupported"),
    ],
)
async def test_what_can_never_run_is_refused_at_once(
    host: FakeHost, links: FakeLinks, change: dict[str, object], code: str
) -> None:
    wanted = machine("vm_1")
    assert wanted.workload
    with pytest.raises(AgentError) as refused:
        await links.ensure("h", dataclasses.replace(wanted, workload=dataclasses.replace(wanted.workload, **change)))
    assert (refused.value.code, refused.value.retryable) == (code, False)
    assert host.agent.documents.get("vm", "vm_1") is None


def test_disks_need_no_program_that_a_host_lacks() -> None:
    """e2fsprogs is part of every Debian."""
    assert shutil.which("debugfs", path="/usr/sbin")
