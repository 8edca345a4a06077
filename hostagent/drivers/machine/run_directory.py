"""What every VMM finds in its run directory at a start. The one rule: nothing of the run before, nobody else's."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hostagent.drivers.machine.protocol import MachinePlan, RenderedFile


def prepare(plan: MachinePlan, stale: Iterable[Path]) -> None:
    """The directory and the machine's log belong to its uid; what is `stale` is gone."""
    plan.run_directory.mkdir(parents=True, exist_ok=True)
    os.chown(plan.run_directory, plan.uid, plan.gid)
    plan.run_directory.chmod(0o700)
    for path in stale:
        path.unlink(missing_ok=True)
    plan.log_path.parent.mkdir(parents=True, exist_ok=True)
    plan.log_path.touch(mode=0o640)
    os.chown(plan.log_path, plan.uid, plan.gid)


def write(file: RenderedFile, uid: int, gid: int) -> None:
    file.path.unlink(missing_ok=True)
    descriptor = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400 if file.is_secret else 0o444)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(file.content)
        os.fchown(opened.fileno(), uid, gid)
