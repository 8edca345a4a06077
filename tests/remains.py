"""What a test run that was killed has left on the machine: its directories carry its pid, so the next run finds them."""

from __future__ import annotations

import os
import re
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path


def directory_of(prefix: str) -> Path:
    """A new name for a directory of this process."""
    return Path(tempfile.gettempdir()) / f"{prefix}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def of_killed_runs(prefix: str) -> Iterator[Path]:
    """Directories of processes that are gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}-*"):
        found = re.fullmatch(rf"{prefix}-(\d+)-[0-9a-f]{{8}}", path.name)
        if found and path.is_dir() and not Path("/proc", found[1]).exists():
            yield path
