"""The agent's version is the digest of its file. The one rule: nobody writes a version down, so it cannot be wrong."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path

DIGEST_LENGTH = 16


@cache
def version() -> str:
    """The first 16 hex digits of the zipapp's sha256; `source` when the agent runs from a directory."""
    path = archive()
    return hashlib.sha256(path.read_bytes()).hexdigest()[:DIGEST_LENGTH] if path else "source"


def archive() -> Path | None:
    """The zipapp this process runs from."""
    path = Path(sys.argv[0])
    return path.resolve() if path.suffix == ".pyz" and path.is_file() else None
