"""Real hosts for system tests: a lab of two hosts for the module, each with a namespace of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from controlplane.embedded.cleaning import processes_of
from provisioning.lab import HostSpec, Lab, LabError, LabHost
from tests import remains
from tests.system.enrolling import Deployment, open_deployment
from tests.system.running import Up

PREFIX = "bedplate-lab"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Hosts `a` and `b`; nothing of it is left afterwards."""
    with Lab("test", lab_directory(), (HostSpec(name="a"), HostSpec(name="b"))) as made:
        yield made


@pytest.fixture
def fresh_directory() -> Iterator[Path]:
    """A directory that no lab has used; removed if the test did not."""
    directory = lab_directory()
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
async def deployment(database_url: str, tmp_path: Path) -> AsyncIterator[Deployment]:
    """API and worker in this process."""
    async with open_deployment(database_url, tmp_path) as made:
        yield made


@pytest.fixture
def host(fresh_directory: Path) -> Iterator[LabHost]:
    """A host that nobody has enrolled."""
    with Lab("enrol", fresh_directory, (HostSpec(name="h", cores=1, memory_bytes=3 << 30),)) as made:
        yield made.host("h")


def lab_directory() -> Path:
    """A name for a lab of this run, after the labs of runs that were killed are gone."""
    for left in remains.of_killed_runs(PREFIX):
        with contextlib.suppress(LabError, OSError):  # another run is at it, too
            Lab.found(left).clean()
    return remains.directory_of(PREFIX)


@pytest.fixture
def up() -> Iterator[Up]:
    """A state directory without a deployment yet; whatever runs there ends with the test."""
    directory = Path(tempfile.mkdtemp(prefix="bedplate-up-"))
    directory.chmod(0o711)
    one = Up(directory)
    try:
        yield one
    finally:
        if one.process is not None and one.process.poll() is None:
            one.process.terminate()
            one.process.wait(timeout=90)
        for pid in processes_of(directory):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)
