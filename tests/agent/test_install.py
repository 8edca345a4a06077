"""Preflight, install, repair, reboot and removal of the agent on a lab host, with the agent's own file."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hostagent.protocol import codec, frames
from hostagent.protocol.enrol import ChangeLine, InstallPlan
from hostagent.protocol.frames import Answer, Request
from provisioning.host import zipapp
from provisioning.lab import HostSpec, Lab
from provisioning.lab.lab import LabHost

pytestmark = [pytest.mark.lab, pytest.mark.caps("root", "netns", "sshd"), pytest.mark.slow]
PYZ, PLAN = "/tmp/agent.pyz", "/tmp/plan.json"
WAIT_SECONDS = 30.0


@pytest.fixture(scope="module")
def host() -> Iterator[LabHost]:
    directory = Path(tempfile.mkdtemp(prefix="bp-install-"))
    with Lab("install", directory / "lab", (HostSpec(name="h"),)) as lab:
        yield lab.host("h")
    directory.rmdir()


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


def put(host: LabHost, path: str, content: bytes) -> None:
    host.exec(["sh", "-c", 'cat > "$1"', "sh", path], stdin=content)


def bring(host: LabHost, key: Path) -> None:
    plan = InstallPlan(authorized_key=key.with_suffix(".pub").read_text().strip())
    put(host, PYZ, zipapp.build().content)
    put(host, PLAN, json.dumps(codec.encode(plan)).encode())


def agent(host: LabHost, *words: str, check: bool = True) -> list[ChangeLine]:
    finished = host.exec(["/usr/bin/python3", "-I", PYZ, *words], check=check, timeout=60)
    return [codec.decode(ChangeLine, json.loads(line)) for line in finished.stdout.splitlines()]


def as_agent_user(host: LabHost, key: Path, command: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    argv = host.ssh_argv([command], user="bedplate")
    argv[argv.index("-i") + 1] = str(key)
    return subprocess.run(argv, input=stdin, capture_output=True, timeout=30, check=False)


def ask(host: LabHost, key: Path, verb: str, body: dict[str, object]) -> Answer:
    request = frames.encode(Request(id=1, verb=verb, deadline_ms=20_000, body=body))
    argv = host.ssh_argv(["rpc"], user="bedplate")
    argv[argv.index("-i") + 1] = str(key)
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(request)
        process.stdin.flush()
        line = process.stdout.readline()
        process.stdin.close()
        assert line, process.stderr.read() if process.stderr else b""
    answer = frames.decode(line)
    assert isinstance(answer, Answer)
    return answer


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.1)


def listing(host: LabHost) -> dict[str, str]:
    """Everything an installation may touch, with the digests of files."""
    script = (
        "find /etc /opt /var/lib/bedplate /var/log/bedplate /run/bedplate /usr/local -xdev 2>/dev/null "
        "\\( -type f -exec sha256sum {} + -o -printf '%y %l %p\\n' \\) | sort -k2; "
        "sysctl -n net.ipv4.ip_forward net.ipv6.conf.all.forwarding; ls /sys/class/net; nft list tables; ip route"
    )
    lines = host.exec(["sh", "-c", script]).stdout.decode().splitlines()
    # The lock files and backups of useradd are the distribution's own traces.
    return {line: "" for line in lines if not line.endswith(("-", ".lock", "/.pwd.lock"))}


def resident_bytes(host: LabHost) -> int:
    """Of the agent with its real drivers and pyroute2 loaded."""
    script = "for p in $(pgrep -f 'agent.pyz serve'); do grep VmRSS /proc/$p/status; done"
    return max(int(line.split()[1]) * 1024 for line in host.exec(["sh", "-c", script]).stdout.decode().splitlines())


def test_the_whole_life(host: LabHost, key: Path):
    """Preflight, dry run, installation, repair, reboot, removal. Long, because each stands on what the one before left."""
    before = listing(host)
    bring(host, key)
    report = json.loads(host.exec(["/usr/bin/python3", "-I", PYZ, "preflight", "--json", "--plan", PLAN]).stdout)
    assert report["is_fit"], [check for check in report["checks"] if check["result"] == "fail"]
    assert listing(host) == before, "preflight changes nothing"

    planned = agent(host, "install", "--plan", PLAN, "--dry-run")
    assert {line.state for line in planned} == {"planned"}
    assert listing(host) == before, "a dry run changes nothing"
    done = agent(host, "install", "--plan", PLAN)
    assert [line.change for line in done] == [line.change for line in planned]
    assert {line.state for line in done} == {"done"}
    assert agent(host, "install", "--plan", PLAN) == [], "again: nothing to do"

    eventually(lambda: as_agent_user(host, key, "rpc").returncode == 0)
    assert ask(host, key, "facts.observe", {}).body["agent_version"] == zipapp.build().version
    routes = {"id": "routes", "generation": {"epoch": 1, "number": 1}, "routes": []}
    eventually(lambda: ask(host, key, "network.ensure", routes).body["result"]["kind"] == "succeeded")
    assert resident_bytes(host) < 60 << 20
    refused = as_agent_user(host, key, "id; touch /tmp/canary")
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert host.exec(["test", "-e", "/tmp/canary"], check=False).returncode == 1

    host.exec(["sh", "-c", "rm /var/lib/bedplate/login/.ssh/authorized_keys"])
    assert [line.change.subject for line in agent(host, "install", "--plan", PLAN)] == [
        "/var/lib/bedplate/login/.ssh/authorized_keys"
    ]
    host.reboot()
    eventually(lambda: as_agent_user(host, key, "rpc").returncode == 0)

    wrong = ask(host, key, "host.uninstall", {"machine_id": "f" * 32})
    assert wrong.error is not None
    assert wrong.error.code == "host.other_machine"
    machine_id = host.exec(["cat", "/etc/machine-id"]).stdout.decode().strip()
    assert ask(host, key, "host.uninstall", {"machine_id": machine_id}).error is None
    eventually(lambda: b"Permission denied" in as_agent_user(host, key, "rpc").stderr)
    eventually(lambda: not host.exec(["sh", "-c", "ls /run | grep bedplate-uninstall"], check=False).stdout)
    after = listing(host)
    assert set(after) - set(before) == set()
    assert set(before) - set(after) == set()


def test_a_failure_half_way_is_cleaned(host: LabHost, key: Path):
    before = listing(host)
    bring(host, key)
    # /etc/sysctl.d becomes unwritable: the step after the user and the key fails.
    host.exec(["mount", "-t", "tmpfs", "-o", "ro", "none", "/etc/sysctl.d"])
    try:
        lines = agent(host, "install", "--plan", PLAN, check=False)
        assert lines[-1].state == "failed"
        assert lines[-1].change.subject.startswith("/etc/sysctl.d/")
        assert lines[-1].message
    finally:
        host.exec(["umount", "/etc/sysctl.d"])
    undone = agent(host, "uninstall")
    assert {line.state for line in undone} == {"done"}
    assert listing(host) == before


def test_a_dry_uninstall_lists_what_the_real_one_does(host: LabHost, key: Path):
    bring(host, key)
    agent(host, "install", "--plan", PLAN)
    planned = agent(host, "uninstall", "--dry-run")
    done = agent(host, "uninstall")
    assert [line.change for line in planned] == [line.change for line in done]


def test_the_uploaded_file_is_the_digest(host: LabHost, key: Path):
    bring(host, key)
    found = host.exec(["sha256sum", PYZ]).stdout.decode().split()[0]
    assert found == zipapp.build().sha256 == hashlib.sha256(zipapp.build().content).hexdigest()
