"""Files that are whole or absent. The one rule: temporary name, fsync, rename, fsync of the directory."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from hostagent.protocol.errors import AgentError

_SUFFIX = ".partial"


def write_atomically(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Raises AgentError `disk.full`; the old content then stays."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_SUFFIX}")
    with disk_errors(path):
        try:
            temporary.unlink(missing_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def remove(path: Path) -> None:
    """Absent is success."""
    path.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        sync_directory(path.parent)


def remove_tree(path: Path) -> None:
    """A directory with all that is in it, for good; of a link to one both. Absent is success; raises OSError where something
    stays.
    """
    if path.is_symlink():
        remove_tree(path.parent / path.readlink())
        remove(path)
        return
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)
        sync_directory(path.parent)


def sync(path: Path) -> None:
    """What any process wrote to this file is on stable storage."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tail(path: Path, size_bytes: int) -> str:
    """The last words of a log; "" where there is none. Also for logs in a directory of somebody less trusted: what is no
    plain file there (a link to another's secrets, a pipe) has no words.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return ""
        return os.pread(descriptor, size_bytes, max(status.st_size - size_bytes, 0)).decode(errors="replace").strip()
    finally:
        os.close(descriptor)


def give(path: Path, uid: int, gid: int, mode: int) -> None:
    """Owner and mode of exactly this file or directory. Raises OSError (ELOOP) where a link stands in its place."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        os.fchown(descriptor, uid, gid)
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def drop_partials(directory: Path) -> None:
    """Remove what a crash left of `write_atomically`. Only at start, when nobody writes."""
    with contextlib.suppress(FileNotFoundError):
        for entry in directory.iterdir():
            if entry.name.startswith(".") and entry.name.endswith(_SUFFIX):
                entry.unlink(missing_ok=True)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """ENOSPC and EDQUOT as AgentError `disk.full`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise AgentError("disk.full", f"no space left for {path}", path=str(path)) from error
        raise
