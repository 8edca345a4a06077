"""The state directory of a single-machine deployment, and the lock that lets one `up` use it.

The one rule: the lock is held by the open file (flock), so that it is gone with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from controlplane.embedded.valkey import has_short_socket_path


class StateUnusable(RuntimeError):
    """The state directory cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDirectory:
    path: Path

    @property
    def log_directory(self) -> Path:
        return self.path / "logs"

    @property
    def lock_file(self) -> Path:
        return self.path / "up.lock"

    @property
    def token_file(self) -> Path:
        return self.path / "operator-token"

    @property
    def link_file(self) -> Path:
        """The first operator's one-time link, until it was used."""
        return self.path / "operator-link"

    def prepare(self) -> None:
        """Make it (others may pass through, not list). Raises StateUnusable."""
        if not has_short_socket_path(self.path / "postgres/run/.s.PGSQL.5432.lock"):
            raise StateUnusable(f"the path {self.path} is too long for UNIX sockets; give a shorter one by --state")
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o711)
            self.log_directory.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise StateUnusable(f"cannot make {self.path}: {error.strerror}; give another one by --state") from error
        if os.geteuid() == 0:
            self._check_passable()

    def _check_passable(self) -> None:
        for directory in (self.path, *self.path.parents):
            if not directory.stat().st_mode & 0o001:
                raise StateUnusable(
                    f"{directory} cannot be passed by the account that PostgreSQL runs as; "
                    f"chmod o+x {directory}, or give another directory by --state"
                )

    def lock(self) -> IO[str]:
        """Take the lock for this process's life. Raises StateUnusable that names who has it."""
        file = self.lock_file.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise StateUnusable(
                f"{self.path} is in use by another `bedplate up` (pid {holder}); "
                "stop that one, or give another directory by --state"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        return file
