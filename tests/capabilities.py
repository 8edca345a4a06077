"""What a machine can show, and what tests do where it cannot; also for suites that run on another machine than this one.

The one rule: nothing but the standard library and pytest is imported here. `REQUIRE_CAPS=netns,qemu` turns a skip for a missing
capability into a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import namespaces

CONSOLE = Path(__file__).parents[1] / "controlplane" / "console" / "dist" / "index.html"
FLOWTABLE = "table inet probe { flowtable f { hook ingress priority 0; devices = { lo }; }; }"


def _can_make_namespaces() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode == 0


def _loads(rules: str) -> bool:
    """Tried in a namespace that nobody else sees; the program is there only where it can be used."""
    argv = ["unshare", "-n", "nft", "-f", "-"]
    done = subprocess.run(argv, check=False, capture_output=True, input=rules.encode())
    return done.returncode == 0


def _can_make(kind: str) -> bool:
    argv = ["unshare", "-n", "ip", "link", "add", "probe0", "type", kind]
    return os.geteuid() == 0 and subprocess.run(argv, check=False, capture_output=True).returncode == 0


CAPABILITIES: dict[str, Callable[[], bool]] = {
    "root": lambda: os.geteuid() == 0,
    "netns": _can_make_namespaces,
    "wireguard": lambda: (
        shutil.which("wg") is not None and (shutil.which("wireguard-go") is not None or has_capability("kernel_wireguard"))
    ),
    "bird": lambda: shutil.which("bird", path="/usr/sbin:/usr/bin") is not None,
    "sshd": lambda: shutil.which("sshd", path="/usr/sbin:/usr/bin") is not None,
    "nft": lambda: os.access("/usr/sbin/nft", os.X_OK) and Path("/usr/lib/python3/dist-packages/nftables").is_dir(),
    "qemu": lambda: shutil.which("qemu-system-x86_64") is not None,
    "cloud_hypervisor": lambda: (
        os.access(os.environ.get("BEDPLATE_CLOUD_HYPERVISOR", ""), os.X_OK) and os.access("/dev/kvm", os.R_OK | os.W_OK)
    ),
    "qsd": lambda: shutil.which("qemu-storage-daemon") is not None,
    "runc": lambda: shutil.which("runc", path="/usr/sbin:/usr/bin") is not None,
    "model": lambda: any(shutil.which(name) for name in ("pip3", "pip", "uv")),
    "flowtable": lambda: os.geteuid() == 0 and _loads(FLOWTABLE),
    "kernel_wireguard": lambda: _can_make("wireguard"),
    "own_machine": lambda: os.environ.get("TEST_MACHINE_IS_OURS") == "1",
    "systemd": lambda: os.geteuid() == 0 and Path("/run/systemd/system").is_dir(),
    "busybox": lambda: shutil.which("busybox") is not None,
    "pebble": lambda: all(shutil.which(name) for name in ("pebble", "pebble-challtestsrv")),
    "console": lambda: Path("/usr/bin/chromium").exists() and CONSOLE.exists(),
    "promtool": lambda: shutil.which("promtool") is not None,
    "debootstrap": lambda: shutil.which("debootstrap", path="/usr/sbin:/usr/bin") is not None,
}


@cache
def has_capability(name: str) -> bool:
    return CAPABILITIES[name]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    required = set(filter(None, os.environ.get("REQUIRE_CAPS", "").split(",")))
    for item in items:
        for marker in item.iter_markers("caps"):
            missing = [name for name in marker.args if not has_capability(name)]
            if missing and not required.intersection(missing):
                item.add_marker(pytest.mark.skip(reason=f"this machine lacks: {', '.join(missing)}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what this machine could not run, and why."""
    left_out: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        left_out[reason.removeprefix("Skipped: ")] += 1
    if missing := sorted(name for name in CAPABILITIES if not has_capability(name)):
        terminalreporter.write_line(f"this machine lacks: {', '.join(missing)}")
    for reason, count in sorted(left_out.items()):
        terminalreporter.write_line(f"left out: {count} tests ({reason})")


@pytest.fixture
def own_network() -> Iterator[None]:
    """This thread in a fresh network namespace; the machine's own is not touched."""
    with namespaces.own():
        yield
