"""Facts of odd hosts: whatever a vendor wrote into DMI, with or without swap, and whatever a clock shows, nothing breaks."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from controlplane.resources.host.conditions import clock_skew, conditions, with_clock
from hostagent.facts import hardware, system
from hostagent.facts.host import global_ipv6_prefixes
from hostagent.protocol.enrol import Check, PreflightReport
from hostagent.protocol.facts import InterfaceFact
from tests.fakehost import fake_facts

NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("vendor", "flags", "is_vm"),
    [
        (b"To Be Filled By O.E.M.", "fpu vme", False),
        (b"\xff\xfe\x00Default string\x00\x00", "fpu", False),
        (b"", "fpu", False),
        (None, "fpu", False),
        (b"QEMU", "fpu", True),
        (b"Dell Inc.", "fpu hypervisor", True),
    ],
)
def test_odd_dmi_breaks_nothing(tmp_path: Path, vendor: bytes | None, flags: str, is_vm: bool) -> None:
    if vendor is not None:
        directory = tmp_path / "sys/class/dmi/id"
        directory.mkdir(parents=True)
        (directory / "sys_vendor").write_bytes(vendor)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    assert system.is_virtual_machine(tmp_path / "sys", tmp_path / "proc") is is_vm


def test_no_swap_is_only_said(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       16384 kB\nMemFree:  1 kB\n")
    assert hardware.memory(tmp_path) == {"MemTotal": 16 << 20, "SwapTotal": 0} | {"MemFree": 1024}


def test_prefixes_are_counted_once_and_private_ones_not() -> None:
    one = InterfaceFact(
        name="eth0", mac="", mtu_bytes=1500, addresses=("2a00:1450:1::1/64", "2a00:1450:1::2/128", "fe80::1/64")
    )
    two = InterfaceFact(name="eth1", mac="", mtu_bytes=1500, addresses=("2a02:26f0::1/64", "fd00::1/64", "10.0.0.1/8"))
    assert len(global_ipv6_prefixes((one,))) == 1
    assert len(global_ipv6_prefixes((one, two))) == 2


@pytest.mark.parametrize(("ahead", "found"), [(0.5, 0.0), (1.0, 0.0), (61.0, 60.0), (-30.0, -30.0)])
def test_a_clock_is_judged_only_beyond_the_time_the_answer_took(ahead: float, found: float) -> None:
    """Asked at 0 s, answered at 1 s."""
    shown = int((NOW + timedelta(seconds=ahead)).timestamp() * 1000)
    assert clock_skew(shown, NOW, NOW + timedelta(seconds=1)).total_seconds() == found


def test_a_wrong_clock_is_in_the_report_and_a_condition() -> None:
    wrong = replace(fake_facts("h", cpus=4, memory_bytes=8 << 30), clock_unix_ms=int(NOW.timestamp() * 1000) + 90_000)
    checks = (Check(name="root", result="ok", why=""), Check(name="clock", result="ok", why="a time service runs"))
    report = with_clock(PreflightReport(is_fit=True, checks=checks, facts=wrong), NOW, NOW)
    assert [check.result for check in report.checks] == ["ok", "warn"]
    assert report.checks[1].why == "its clock is 90 s ahead of the control plane's"
    assert report.is_fit
    assert '"clock_skew"' in json.dumps(conditions(wrong, data_interface="", now=NOW))
