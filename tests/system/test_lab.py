"""Lab hosts behave like machines, and a lab leaves nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from provisioning.lab import HostSpec, Lab, LabError
from provisioning.lab.model import LabRecord
from tests.system.conftest import lab_directory

pytestmark = [pytest.mark.lab, pytest.mark.caps("root", "netns", "sshd")]
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def traces(directory: Path, record: LabRecord) -> dict[str, int]:
    """How many of each thing on the machine belong to this lab; other labs come and go at the same time."""
    links = json.loads(subprocess.run(["ip", "-json", "link"], capture_output=True, check=True).stdout)
    routes = subprocess.run(["ip", "route", "show", "table", "all"], capture_output=True, text=True, check=True).stdout
    subnet = record.ipv4.rsplit(".", 1)[0] + "."
    return {
        "links": sum(link["ifname"] == record.link for link in links),
        "routes": sum(subnet in line for line in routes.splitlines()),
        "mounts": sum(str(directory) in line for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        "cgroups": sum(1 for _ in Path("/sys/fs/cgroup").glob(f"**/bedplate-lab-{record.id}")),
        "processes": len(_processes_of(str(directory))),
        "files": int(directory.exists()),
    }


NOTHING = {"links": 0, "routes": 0, "mounts": 0, "cgroups": 0, "processes": 0, "files": 0}


def _processes_of(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/mountinfo"):
        try:
            if word in path.read_text():
                found.append((path.parent / "cmdline").read_text())
        except OSError:
            continue
    return found


def test_hosts_are_machines_of_their_own(lab: Lab) -> None:
    a, b = lab.host("a"), lab.host("b")
    a.ssh(["echo one > /etc/bedplate/mark; useradd --system only-here; for d in opt tmp run; do echo x > /$d/file; done"])
    assert (
        b.ssh(["test ! -e /etc/bedplate/mark && test ! -e /opt/file && ! id only-here 2>/dev/null && hostname"]).stdout
        == b"b\n"
    )
    assert not Path("/etc/bedplate/mark").exists()
    assert "only-here" not in Path("/etc/passwd").read_text()
    before = a.ssh(["cat", BOOT_ID]).stdout
    a.exec(["ip", "link", "add", "leftover", "type", "bridge"])
    a.reboot()
    assert a.ssh(["cat", BOOT_ID]).stdout != before
    assert a.ssh(["cat", "/etc/bedplate/mark", "/opt/file"]).stdout == b"one\nx\n"
    assert a.ssh(["id", "only-here"]).returncode == 0
    assert a.ssh(["ls", "/tmp", "/run"]).stdout.count(b"file") == 0
    assert a.exec(["ip", "link", "show", "leftover"], check=False).returncode != 0


def test_hosts_reach_each_other_over_both_families(lab: Lab) -> None:
    a, b = lab.host("a"), lab.host("b")
    a.ssh(["ping", "-c1", "-W5", b.record.address])
    b.ssh(["ping", "-c1", "-W5", a.record.address_ipv6])


def test_only_pid_1_is_the_ancestor_and_units_restart(lab: Lab) -> None:
    b = lab.host("b")
    unit = {"name": "beat", "argv": ["/bin/sh", "-c", "echo $$ >> /root/beats; exec sleep 1000"], "restart": "always"}
    b.exec(
        ["sh", "-c", "mkdir -p /etc/bedplate/units.d; cat > /etc/bedplate/units.d/beat.json"], stdin=json.dumps(unit).encode()
    )
    b.exec(["kill", "-HUP", "1"])
    wait = "for i in $(seq 100); do test $(wc -l < /root/beats) -ge $0 && exit 0; sleep 0.1; done; exit 1"
    b.exec(["sh", "-c", "for i in $(seq 100); do test -s /root/beats && exit 0; sleep 0.1; done; exit 1"])
    b.exec(["sh", "-c", "kill -9 $(tail -n1 /root/beats)"])
    b.exec(["sh", "-c", wait, "2"])
    b.exec(["sh", "-c", "rm /etc/bedplate/units.d/beat.json; kill -HUP 1"])
    b.exec(
        ["sh", "-c", "for i in $(seq 100); do kill -0 $(tail -n1 /root/beats) 2>/dev/null || exit 0; sleep 0.1; done; exit 1"]
    )


@pytest.mark.caps("runc")
def test_runc_runs_a_container_inside(lab: Lab) -> None:
    script = """
    set -e
    mkdir -p /root/c/rootfs/bin && cp /bin/busybox /root/c/rootfs/bin/ && cd /root/c && rm -f config.json && runc spec
    sed -i 's/"terminal": true/"terminal": false/; s/"sh"/"\\/bin\\/busybox","echo","inside"/' config.json
    runc run one
    """
    done = lab.host("a").ssh([script], check=False)
    assert done.stdout == b"inside\n", done.stderr


def test_two_labs_and_a_gateway_leave_nothing_behind(fresh_directory: Path) -> None:
    other = fresh_directory.with_name(fresh_directory.name + "-other")
    one = Lab("one", fresh_directory, (HostSpec(name="a"), HostSpec(name="gw", kind="gateway")))
    two = Lab("two", other, (HostSpec(name="a"),))
    with one, two:
        assert one.record.ipv4 != two.record.ipv4
        assert one.host("a").ssh(["hostname"]).stdout == two.host("a").ssh(["hostname"]).stdout == b"a\n"
        gateway = one.host("gw")
        assert gateway.address.startswith("127.")
        own = Path("/proc/self/ns/net").stat().st_ino
        assert int(gateway.ssh(["stat", "-Lc", "%i", "/proc/self/ns/net"]).stdout) == own
        gateway.ssh(["ping", "-c1", "-W5", one.host("a").data_address])
        assert all(traces(fresh_directory, one.record).values())
    assert traces(fresh_directory, one.record) == NOTHING
    assert traces(other, two.record) == NOTHING


def test_clean_after_the_creator_was_killed(fresh_directory: Path) -> None:
    argv = [sys.executable, "-m", "provisioning.lab", "--directory", str(fresh_directory)]
    code = f"""
import os, signal
from pathlib import Path
from provisioning.lab import HostSpec, Lab
lab = Lab("killed", Path({str(fresh_directory)!r}), (HostSpec(name="a"), HostSpec(name="b")))
lab.up()
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    record = Lab.found(fresh_directory).record
    listed = subprocess.run([*argv, "list"], check=True, capture_output=True, text=True, timeout=30)
    assert listed.stdout.count("running") == 2
    assert subprocess.run([*argv, "ssh", "a", "hostname"], check=True, capture_output=True, timeout=30).stdout == b"a\n"
    subprocess.run([*argv, "clean"], check=True, timeout=60)
    assert traces(fresh_directory, record) == NOTHING


def test_the_next_run_removes_what_a_killed_one_left() -> None:
    code = """
import os, signal
from provisioning.lab import HostSpec, Lab
from tests.system.conftest import lab_directory
lab = Lab("killed", lab_directory(), (HostSpec(name="a"),))
lab.up()
print(lab.directory, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, stdout=subprocess.PIPE)
    assert killed.returncode == -signal.SIGKILL
    directory = Path(killed.stdout.decode().strip())
    record = Lab.found(directory).record
    assert all(traces(directory, record).values())
    lab_directory()
    assert traces(directory, record) == NOTHING


@pytest.mark.parametrize(
    "kill_after", ["choose_networks", "make_router", "prepare_disk", "make_cgroups", "_launch", "connect_host"]
)
def test_clean_after_the_creator_was_killed_halfway(fresh_directory: Path, kill_after: str) -> None:
    code = f"""
import os, signal
from pathlib import Path
from provisioning.lab import HostSpec, Lab, lab, network
place = next(p for p in (lab, network, Lab) if hasattr(p, {kill_after!r}))
real = getattr(place, {kill_after!r})
def deadly(*a, **k):
    real(*a, **k)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(place, {kill_after!r}, deadly)
Lab("killed", Path({str(fresh_directory)!r}), (HostSpec(name="a"),)).up()
"""
    killed = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = Lab.found(fresh_directory)
    left.record.ipv4 = left.record.ipv4 or "203.0.113.0/24"
    left.clean()
    assert traces(fresh_directory, left.record) == NOTHING


def test_an_unknown_lab_or_host_is_named(fresh_directory: Path, lab: Lab) -> None:
    with pytest.raises(LabError, match="there is no lab"):
        Lab.found(fresh_directory)
    with pytest.raises(LabError, match="has no host nobody"):
        lab.host("nobody")
