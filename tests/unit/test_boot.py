"""What an agent under systemd relies on at a host's boot."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from pathlib import Path

import pytest

from hostagent.drivers.machine.kvm import device_groups
from hostagent.facts import kvm, system
from hostagent.facts.host import Learner
from hostagent.install.layout import modules_text
from hostagent.lib.hostconfig import HostConfig
from hostagent.lib.paths import Paths
from hostagent.protocol.facts import KvmFact
from hostagent.serve.service import tell_systemd


async def test_a_device_that_comes_later_is_asked_for_again(tmp_path: Path) -> None:
    """udev loads KVM's module whenever it comes to it; what was found in this boot is kept only when it cannot change."""
    answers = [
        KvmFact(device_present=False, usable=False, reason=f"{kvm.DEVICE} does not exist"),
        KvmFact(device_present=True, usable=True, reason=""),
    ]

    async def probe() -> KvmFact:
        return answers.pop(0)

    path = tmp_path / "kvm.json"
    assert not (await kvm.cached(path, "boot", probe)).usable
    assert (await kvm.cached(path, "boot", probe)).usable
    assert (await kvm.cached(path, "boot", probe)).usable, "kept"
    assert answers == []


async def test_a_probe_outlives_whoever_has_no_patience(tmp_path: Path) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def probe() -> KvmFact:
        assert not begun.is_set(), "one probe for all"
        begun.set()
        await may_end.wait()
        return KvmFact(device_present=True, usable=True)

    learner = Learner(Paths.under(tmp_path), HostConfig(), None, "1")
    learner.kvm_probe = probe
    impatient = asyncio.create_task(learner.probe_kvm())
    await begun.wait()
    impatient.cancel()
    patient = asyncio.create_task(learner.probe_kvm())
    await asyncio.sleep(0)
    may_end.set()
    assert (await patient).usable
    assert impatient.cancelled()


def test_the_group_that_may_open_the_device_is_read_when_it_is_needed(tmp_path: Path) -> None:
    assert device_groups(tmp_path / "kvm") == ()
    (tmp_path / "kvm").touch()
    assert device_groups(tmp_path / "kvm") == ((tmp_path / "kvm").stat().st_gid,)


def test_modules_follow_the_processor(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu svm\n")
    assert modules_text(system.processor_flags(tmp_path)) == "kvm_amd\ntun\n"
    assert modules_text({"vmx"}) == "kvm_intel\ntun\n"
    assert modules_text(set()) == "tun\n"


def test_whoever_waits_for_the_agent_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell_systemd("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        tell_systemd("READY=1")
        assert listener.recv(100) == b"READY=1"
        tell_systemd("READY=1")
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.recv(100)


def test_the_rules_that_probe_for_flowtables_are_well_formed() -> None:
    """Where the kernel has none nft says so; it must not be for a mistake of ours."""
    argv = ["unshare", "-rn", "nft", "-c", "-f", "-"]
    try:
        done = subprocess.run(argv, check=False, input=system._FLOWTABLE, capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        pytest.skip("no nft here")
    assert "syntax error" not in done.stderr, done.stderr
