"""What a host's facts mean for an operator: conditions with a reason and the next thing to do. Pure.

The one rule: nothing that is missing is replaced in silence; it becomes a condition that names it.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from controlplane.core.json import Json
from hostagent.protocol.enrol import Check, PreflightReport
from hostagent.protocol.facts import HostFacts

MIN_FREE_RATIO = 0.1
MOST_SKEW = timedelta(seconds=2)
_ANSWER_SECONDS = 15.0  # facts may have been that long on their way


def clock_skew(clock_unix_ms: int, asked: datetime, answered: datetime) -> timedelta:
    """How far a clock that was read between two moments of ours is ahead of us (behind: negative), at least."""
    if clock_unix_ms == 0:  # not told
        return timedelta(0)
    shown = datetime.fromtimestamp(clock_unix_ms / 1000, tz=asked.tzinfo)
    return max(shown - answered, timedelta(0)) + min(shown - asked, timedelta(0))


def with_clock(report: PreflightReport, asked: datetime, answered: datetime) -> PreflightReport:
    """The report with the host's clock compared with ours, which only the control plane can do."""
    skew = clock_skew(report.facts.clock_unix_ms, asked, answered)
    if abs(skew) <= MOST_SKEW:
        return report
    found = Check(name="clock", result="warn", why=_skew_words(skew), fix="Let chrony or systemd-timesyncd set it.")
    return replace(report, checks=tuple(found if check.name == "clock" else check for check in report.checks))


def _skew_words(skew: timedelta) -> str:
    seconds = skew.total_seconds()
    return f"its clock is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the control plane's"


def conditions(facts: HostFacts, *, data_interface: str, now: datetime) -> list[Json]:
    """Every condition of the host, sorted by type; a host without any worth telling has `Ready` only."""
    found = [
        _condition("Ready", "true", "enrolled", f"Agent {facts.agent_version} answers.", now),
        *_machine_conditions(facts, now),
        *_data_conditions(facts, data_interface, now),
        *_tunnel_conditions(facts, now),
        *_clock_conditions(facts, now),
    ]
    if facts.state_total_bytes and facts.state_free_bytes < facts.state_total_bytes * MIN_FREE_RATIO:
        free = facts.state_free_bytes >> 30
        found.append(_condition("DiskLow", "true", "disk_low", f"{free} GiB are left for images and volumes.", now))
    found += [
        _condition("Fact", "true", name, f"The agent reports: {name.replace('_', ' ')}.", now)
        for name in facts.conditions
        if not name.startswith("vmm_")
    ]
    return sorted(found, key=lambda item: (str(item["type"]), str(item["reason"])))  # type: ignore[index,call-overload]


def _machine_conditions(facts: HostFacts, now: datetime) -> list[Json]:
    if not facts.kvm.usable:
        words = f"Machines are emulated: {facts.kvm.reason or 'there is no /dev/kvm'}."
        return [_condition("Kvm", "false", "kvm_unusable", words, now)]
    if "cloud_hypervisor" in facts.machine_drivers:
        return []
    remedy = "bedplate host add … --artifact-dir DIR with its static binary."
    told = next((name for name in facts.conditions if name.startswith(("vmm_too_old", "vmm_broken"))), "vmm_missing")
    reason, _, version = told.partition(":")
    words = {
        "vmm_missing": f"KVM works here, but Cloud Hypervisor is missing: {remedy}",
        "vmm_too_old": f"KVM works here, but Cloud Hypervisor {version} is too old, 52.0 is the least: {remedy}",
        "vmm_broken": f"KVM works here, but Cloud Hypervisor does not start, not even to say its version: {remedy}",
    }[reason]
    return [_condition("MachineDriver", "false", reason, words, now)]


def _data_conditions(facts: HostFacts, data_interface: str, now: datetime) -> list[Json]:
    if not data_interface or data_interface in {interface.name for interface in facts.interfaces}:
        return []
    words = f"The data interface {data_interface} does not exist on the host."
    return [_condition("DataNetwork", "false", "data_interface_missing", words, now)]


def _tunnel_conditions(facts: HostFacts, now: datetime) -> list[Json]:
    if facts.tunnel_driver:
        return []
    words = (
        "No machine of an encrypted network is placed here: the kernel has no WireGuard, and wireguard-go is missing, or the "
        "program wg is. Add the host again, which installs what is missing."
    )
    return [_condition("Tunnels", "false", "tunnels_missing", words, now)]


def _clock_conditions(facts: HostFacts, now: datetime) -> list[Json]:
    skew = clock_skew(facts.clock_unix_ms, now - timedelta(seconds=_ANSWER_SECONDS), now)
    if abs(skew) <= MOST_SKEW:
        return []
    return [_condition("Clock", "false", "clock_skew", f"{_skew_words(skew).capitalize()}, or more.", now)]


def _condition(kind: str, status: str, reason: str, message: str, now: datetime) -> dict[str, Json]:
    return {"type": kind, "status": status, "reason": reason, "message": message, "since": now.isoformat()}
