"""Suites about what only the server's kernel and systemd have, run by pytest on the server itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioning.lab.metal import MetalHost
from tests.metal.shipping import shipped

pytestmark = [
    pytest.mark.metal,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.caps("root", "qemu", "debootstrap"),
]
# What is run there, which of its tests, and what the server has that they are about. Two suites fit into every run.
QUICK = (
    ("tests/conformance/test_supervisors.py", "systemd", "systemd"),
    ("tests/agent/test_flowtable.py", "passes_by or backends_end", "flowtable"),
)
THOROUGH = (
    ("tests/conformance/test_tunnels.py", "not fake", "kernel_wireguard"),
    ("tests/agent/test_flowtable.py", "not passes_by and not backends_end", "flowtable"),
    ("tests/agent/test_flow_table_full.py", "test", "own_machine"),
)
SUITES = (*QUICK, *(pytest.param(*suite, marks=pytest.mark.thorough) for suite in THOROUGH))


@pytest.fixture(scope="module")
def python(server: MetalHost) -> Iterator[list[str]]:
    with shipped(server) as argv:
        yield argv


@pytest.mark.parametrize(("path", "words", "capability"), SUITES)
def test_what_only_a_server_has(server: MetalHost, python: list[str], path: str, words: str, capability: str) -> None:
    argv = ["env", f"REQUIRE_CAPS={capability}", "TEST_MACHINE_IS_OURS=1", *python, "-m", "pytest", path, "-k", words]
    argv += [
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.capabilities",
        f"--confcutdir={Path(path).parent}",
        "--timeout=300",
        "--durations=5",
    ]
    done = server.exec(argv, timeout=800, check=False)
    said = done.stdout.decode() + done.stderr.decode()
    assert done.returncode == 0, said
    assert re.search(r"\b[1-9]\d* passed", said), said
    assert "skipped" not in said, said
