"""The deployment's master key on disk.

The one rule: it is made once, by whoever starts first, and replaced by a rotation alone; processes get its path, never its
value.
"""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

from controlplane.core.sealing import KEY_BYTES, Sealer
from controlplane.settings import Settings

CREDENTIAL = "bedplate-master-key"
_COMMAND_SECONDS = 30


class KeyFileUnusable(RuntimeError):
    """The master key cannot be read, or should not be trusted; the message says why."""


def master_key_path(settings: Settings) -> Path:
    """The file named in the settings, else systemd's credential, else the one in the state directory."""
    if settings.master_key_file is not None:
        return settings.master_key_file
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    if credentials and (credential := Path(credentials) / CREDENTIAL).exists():
        return credential
    return settings.state_dir / "master.key"


def load_sealer(settings: Settings) -> Sealer:
    """A sealer with the master key; the key is made when there is none at the default place. Raises KeyFileUnusable."""
    if is_own(settings):
        make_key(master_key_path(settings))
    return Sealer(read_master_key(settings))


def read_master_key(settings: Settings) -> bytes:
    """The key that is there; raises KeyFileUnusable when there is none."""
    return _ask(settings.master_key_command) if settings.master_key_command else read_key(master_key_path(settings))


def is_own(settings: Settings) -> bool:
    """Whether the key lies where Bedplate itself puts it, so that it may be made and replaced."""
    return not settings.master_key_command and master_key_path(settings) == settings.state_dir / "master.key"


def _ask(command: list[str]) -> bytes:
    """What a command prints: 32 raw bytes, or their base64. It inherits our environment and gets no input."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KeyFileUnusable(f"the master key command {command[0]} did not answer: {error}") from error
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip()
        raise KeyFileUnusable(f"the master key command {command[0]} failed with {done.returncode}: {words}")
    if len(done.stdout) == KEY_BYTES:
        return done.stdout
    with contextlib.suppress(ValueError):
        key = base64.b64decode(done.stdout.strip(), validate=True)
        if len(key) == KEY_BYTES:
            return key
    raise KeyFileUnusable(f"the master key command {command[0]} must print {KEY_BYTES} bytes, raw or as base64")


def read_key(path: Path) -> bytes:
    """The key in a file; raises KeyFileUnusable."""
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


def make_key(path: Path) -> None:
    """Make a key unless there is one; of two makers at once the first wins, and a crash leaves a whole key or none."""
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
