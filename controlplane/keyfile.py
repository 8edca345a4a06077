"""The deployment's master key on disk.

The one rule: it is made once, by whoever starts first, and never replaced; processes get its path, never its value.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from controlplane.core.sealing import KEY_BYTES, Sealer
from controlplane.settings import Settings


class KeyFileUnusable(RuntimeError):
    """The master key cannot be read, or should not be trusted; the message says why."""


def master_key_path(settings: Settings) -> Path:
    return settings.master_key_file or settings.state_dir / "master.key"


def load_sealer(settings: Settings) -> Sealer:
    """A sealer with the master key; the key is made when there is none at the default place. Raises KeyFileUnusable."""
    path = master_key_path(settings)
    if settings.master_key_file is None:
        _make(path)
    return Sealer(_read(path))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            key = file.read(KEY_BYTES + 1)
    except OSError as error:
        raise KeyFileUnusable(f"cannot read the master key {path}: {error.strerror}") from error
    if mode & 0o007:
        raise KeyFileUnusable(f"the master key {path} can be read by others: chmod 0600 {path}")
    if len(key) != KEY_BYTES:
        raise KeyFileUnusable(f"the master key {path} must have exactly {KEY_BYTES} bytes")
    return key


def _make(path: Path) -> None:
    """Make the key unless there is one; of two makers at once the first wins, and a crash leaves a whole key or none."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o711)
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
    finally:
        Path(partial).unlink()
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
