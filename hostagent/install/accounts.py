"""The login user, and the traces that making one leaves in /etc.

The one rule: `useradd` and `userdel` keep the file before last as `/etc/passwd-` and so on; those copies are put aside first
and put back last, so that the host's /etc is what it was.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import time
from pathlib import Path

from hostagent.install.commands import CommandFailed, command
from hostagent.install.layout import USER, Layout

ETC = Path("/etc")
BACKUPS = ("passwd-", "shadow-", "group-", "gshadow-", "subuid-", "subgid-")
_STOP_SECONDS = 30.0


def add_user(layout: Layout) -> None:
    """Raises CommandFailed. The password is "*", not "!": sshd without PAM takes that for a locked account."""
    aside = layout.backups
    if not aside.is_dir():
        aside.mkdir(mode=0o700)
        for name in BACKUPS:
            with contextlib.suppress(FileNotFoundError):
                _copy(ETC / name, aside / name)
    argv = ("useradd", "--system", "--user-group", "--no-create-home", "--home-dir", str(layout.home))
    command(*argv, "--shell", "/bin/sh", "--password", "*", USER)


def remove_user(layout: Layout) -> None:
    """Ends its sessions first: the one that asked for the removal is one of them. Absent is success."""
    try:
        uid = pwd.getpwnam(USER).pw_uid
    except KeyError:
        pass
    else:
        _end_processes(uid)
        _delete()
    _put_back(layout.backups)


def _end_processes(uid: int) -> None:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                os.kill(int(entry.name), signal.SIGKILL)


def _delete() -> None:
    deadline = time.monotonic() + _STOP_SECONDS
    while True:
        try:
            command("userdel", USER)
        except CommandFailed:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def _put_back(aside: Path) -> None:
    """Only copies that still differ by our user alone: what somebody else changed meanwhile stays."""
    if not aside.is_dir():
        return
    for name in BACKUPS:
        kept, now = aside / name, ETC / name
        if not now.exists() or not _is_ours(now):
            continue
        if kept.exists():
            _copy(kept, now)
        else:
            now.unlink()


def _copy(source: Path, target: Path) -> None:
    """With its owner: a copy of /etc/shadow belongs to the group `shadow`."""
    shutil.copy2(source, target)
    status = source.stat()
    os.chown(target, status.st_uid, status.st_gid)


def _is_ours(backup: Path) -> bool:
    """Whether the copy was made by our `userdel`: it holds our user, which the file itself does not any more."""
    current = backup.with_name(backup.name.removesuffix("-"))
    if not current.exists():
        return False
    mark = f"{USER}:".encode()
    lines = [line for line in backup.read_bytes().splitlines() if not line.startswith(mark)]
    return lines == current.read_bytes().splitlines()
