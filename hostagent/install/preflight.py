"""Whether a host is fit, without changing it. The one rule: read-only, and every finding says why and what to do."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from hostagent.facts.host import Learner
from hostagent.facts.kvm import not_probed
from hostagent.facts.sysfs import PROC, entries, text
from hostagent.install.commands import CommandFailed, command
from hostagent.install.layout import Layout
from hostagent.install.steps import reads_units
from hostagent.lib import hostconfig
from hostagent.lib.hostconfig import UIDS_PER_MACHINE
from hostagent.lib.paths import Paths
from hostagent.lib.program import minimal_environment
from hostagent.protocol.enrol import Check, InstallPlan, PreflightReport
from hostagent.protocol.facts import HostFacts

LEAST_MEMORY_BYTES = 1 << 30
LEAST_FREE_BYTES = 4 << 30
LEAST_PYTHON = (3, 11)
_NEEDED = {"openssl": "openssl", "ip": "iproute2", "unshare": "util-linux"}
_CLOCKS = ("chronyd", "systemd-timesyn", "ntpd", "ntpd-rs", "openntpd")
_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


async def preflight(paths: Paths, plan: InstallPlan | None, version: str) -> PreflightReport:
    """KVM is not probed here: that needs the guest's kernel, which enrolment brings. Only its device is looked at."""
    config = hostconfig.load(paths.host_config)
    learner = Learner(paths, config, None, version)
    learner.kvm_probe = not_probed
    facts = await learner.learn()
    checks = tuple(_checks(paths, config, plan, facts))
    return PreflightReport(is_fit=not any(check.result == "fail" for check in checks), checks=checks, facts=facts)


def report_text(report: PreflightReport) -> str:
    lines = [f"{report.facts.hostname}: {report.facts.os_id} {report.facts.os_version}, {report.facts.architecture}"]
    for check in report.checks:
        lines.append(f"  {_MARKS[check.result]}  {check.name}: {check.why}")
        if check.fix and check.result != "ok":
            lines.append(f"        {check.fix}")
    lines.append("This host can be added." if report.is_fit else "This host cannot be added as it is.")
    return "\n".join(lines)


def _checks(paths: Paths, config: hostconfig.HostConfig, plan: InstallPlan | None, facts: HostFacts) -> Iterator[Check]:
    yield _python()
    yield _root()
    yield _system(facts)
    yield _supervisor(facts)
    yield _memory(facts)
    yield _disk(facts)
    yield _programs(plan)
    yield _kvm(facts)
    yield _tun(facts)
    yield from _sshd()
    yield from _enrolled(paths, plan)
    yield from _neighbours(facts)
    yield _clock()
    yield _swap(facts)
    yield _uids(config)
    yield from (
        Check(name="config", result="warn", why=f"{paths.host_config} says something not understood: {name}", fix="Correct it.")
        for name in config.unknown
    )


def _python() -> Check:
    found = sys.version_info[:3]
    if found < LEAST_PYTHON:
        return Check(name="python", result="fail", why=f"Python is {found}", fix="Install Python 3.11 or newer.")
    return Check(name="python", result="ok", why=".".join(map(str, found)))


def _root() -> Check:
    if os.geteuid() != 0:
        return Check(name="root", result="fail", why="not run as root", fix="Log in as root, or add --sudo.")
    return Check(name="root", result="ok", why="runs as root")


def _system(facts: HostFacts) -> Check:
    name = f"{facts.os_id} {facts.os_version} on {facts.architecture}"
    if facts.architecture not in ("x86_64", "aarch64"):
        return Check(name="system", result="fail", why=name, fix="Use a host with x86_64 or aarch64.")
    if facts.os_id not in ("debian", "ubuntu"):
        return Check(name="system", result="warn", why=name, fix="Debian 12 or Ubuntu 24.04 and later are tried.")
    return Check(name="system", result="ok", why=name)


def _supervisor(facts: HostFacts) -> Check:
    if facts.supervisor == "systemd" or reads_units():
        return Check(name="supervisor", result="ok", why=facts.supervisor)
    fix = "Use systemd, or a pid 1 that starts what stands in /etc/bedplate/units.d and reads it again at SIGHUP."
    return Check(name="supervisor", result="fail", why="pid 1 is not systemd", fix=fix)


def _memory(facts: HostFacts) -> Check:
    size = facts.schedulable_memory_bytes
    if size < LEAST_MEMORY_BYTES:
        return Check(name="memory", result="fail", why=f"{size >> 20} MiB for machines", fix="Give it 1 GiB or more.")
    return Check(name="memory", result="ok", why=f"{size >> 20} MiB and {facts.schedulable_cpus} CPUs for machines")


def _disk(facts: HostFacts) -> Check:
    free = facts.state_free_bytes
    if free < LEAST_FREE_BYTES:
        fix = "Free 4 GiB or more below /var/lib."
        return Check(name="disk", result="fail", why=f"{free >> 20} MiB free below /var/lib", fix=fix)
    return Check(name="disk", result="ok", why=f"{free >> 30} GiB free below /var/lib")


def _programs(plan: InstallPlan | None) -> Check:
    coming = set(plan.packages) if plan else set()
    missing = {
        name: package
        for name, package in _NEEDED.items()
        if shutil.which(name, path=minimal_environment()["PATH"]) is None and package not in coming
    }
    if missing:
        fix = f"apt-get install {' '.join(sorted(set(missing.values())))}"
        return Check(name="programs", result="fail", why=f"missing: {', '.join(sorted(missing))}", fix=fix)
    return Check(name="programs", result="ok", why="what the agent itself runs is there")


def _kvm(facts: HostFacts) -> Check:
    if not facts.kvm.device_present:
        fix = "Enable virtualisation in the firmware; without it VMs are emulated, which is slow."
        return Check(name="kvm", result="warn", why="/dev/kvm does not exist", fix=fix)
    return Check(name="kvm", result="ok", why="/dev/kvm exists; enrolment boots a guest with it")


def _tun(facts: HostFacts) -> Check:
    if not facts.kernel_features.get("tun"):
        return Check(name="tun", result="warn", why="/dev/net/tun cannot be opened", fix="modprobe tun")
    return Check(name="tun", result="ok", why="taps can be made")


def _sshd() -> Iterator[Check]:
    """What sshd would do with the agent's login user, as it says itself (`sshd -T`)."""
    try:
        printed = command("/usr/sbin/sshd", "-T", "-C", "user=bedplate,host=localhost,addr=127.0.0.1")
    except CommandFailed as error:
        yield Check(name="sshd", result="warn", why=f"its configuration cannot be asked: {error}")
        return
    settings: dict[str, str] = {}
    for line in printed.splitlines():
        name, _, value = line.partition(" ")
        settings[name] = f"{settings[name]} {value}" if name in settings else value
    if settings.get("pubkeyauthentication") == "no":
        yield Check(name="sshd", result="fail", why="PubkeyAuthentication is off", fix="Allow it for user bedplate.")
    elif not re.search(r"(^|\s|%h/)\.ssh/authorized_keys(\s|$)", settings.get("authorizedkeysfile", "")):
        fix = "Add .ssh/authorized_keys to AuthorizedKeysFile for user bedplate."
        yield Check(name="sshd", result="fail", why="AuthorizedKeysFile is not in the home directory", fix=fix)
    elif settings.get("allowusers", "bedplate").find("bedplate") < 0 or "allowgroups" in settings:
        yield Check(
            name="sshd", result="fail", why="not everybody may log in", fix="Add bedplate to AllowUsers or AllowGroups."
        )
    else:
        yield Check(name="sshd", result="ok", why="will let user bedplate in with its key")


def _enrolled(paths: Paths, plan: InstallPlan | None) -> Iterator[Check]:
    file = Layout(paths=paths, digest="").authorized_keys
    if not file.exists():
        return
    found = text(file)
    if plan is not None and plan.authorized_key.split()[1] not in found:
        fix = "Remove it there first, or run the agent's uninstall here."
        yield Check(name="enrolled", result="fail", why="this host belongs to another deployment", fix=fix)
    else:
        yield Check(name="enrolled", result="ok", why="this host is enrolled already; adding it again repairs it")


def _neighbours(facts: HostFacts) -> Iterator[Check]:
    foreign = [condition.partition(":")[2] for condition in facts.conditions if condition.startswith("foreign_forward_policy:")]
    if foreign:
        fix = "Let it accept what is routed to and from the links bp*, or take it off this host."
        why = f"{', '.join(foreign)} may drop what machines send and receive"
        yield Check(name="firewall", result="warn", why=why, fix=fix)
    if facts.is_virtual_machine:
        yield Check(name="bare_metal", result="warn", why="this host is a virtual machine", fix="Nested guests are slower.")
    if "several_global_ipv6_prefixes" in facts.conditions:
        fix = "Say which one machines may use when you make the network."
        yield Check(name="ipv6", result="warn", why="several global IPv6 prefixes are on its links", fix=fix)


def _clock() -> Check:
    running = {text(entry / "comm") for entry in entries(PROC) if entry.name.isdigit()}
    if not running & set(_CLOCKS):
        return Check(name="clock", result="warn", why="nothing keeps the clock right", fix="apt-get install chrony")
    return Check(name="clock", result="ok", why="a time service runs")


def _swap(facts: HostFacts) -> Check:
    why = (
        "there is none; memory is never promised twice, so none is needed" if "no_swap" in facts.conditions else "there is some"
    )
    return Check(name="swap", result="ok", why=why)


def _uids(config: hostconfig.HostConfig) -> Check:
    first, last = config.uid_base, config.uid_base + UIDS_PER_MACHINE * 1000
    for file in (Path("/etc/subuid"), Path("/etc/subgid")):
        for line in text(file).splitlines():
            fields = line.split(":")
            if len(fields) == 3 and fields[1].isdigit() and fields[2].isdigit():
                start = int(fields[1])
                if start < last and first < start + int(fields[2]):
                    fix = f"Set uid_base in {Paths().host_config} to a free range."
                    return Check(name="uids", result="warn", why=f"{file} gives numbers of ours to {fields[0]}", fix=fix)
    return Check(name="uids", result="ok", why=f"machines run as uids from {first}")
