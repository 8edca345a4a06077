"""A container's root tree: unpacked once per archive and uid range, every owner shifted into the range.

The one rule: a tree that has its name is complete; one half unpacked has another and is thrown away.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from pathlib import Path

from hostagent.lib.program import run
from hostagent.protocol.errors import AgentError

ARCHIVES = ("root.tar.zst", "root.tar")
UNPACK_SECONDS = 900.0


def archive_of(image_directory: Path) -> Path:
    """Raises AgentError `vm.image_unsuitable`."""
    found = next((image_directory / name for name in ARCHIVES if (image_directory / name).is_file()), None)
    if found is None:
        raise AgentError("vm.image_unsuitable", f"{image_directory.name} holds none of {', '.join(ARCHIVES)}", retryable=False)
    return found


async def unpack(archive: Path, directory: Path, *, uid: int, gid: int, count: int) -> Path:
    """The tree below `directory`, unpacked now if it is not there. Trees of other archives are removed.

    `count` is the length of the range; an owner outside it becomes the range's root.
    """
    tree = directory / _name(archive, uid, count)
    if not _is_there(tree):
        await _unpack(archive, tree, uid=uid, gid=gid, count=count)
    await asyncio.to_thread(_remove_others, tree)
    return tree


def _name(archive: Path, uid: int, count: int) -> str:
    """An archive is a link to a content-addressed file, so its inode and times tell it from any other."""
    status = archive.stat()
    return f"tree-{status.st_ino}-{status.st_size}-{status.st_mtime_ns}-{uid}-{count}"


def _is_there(tree: Path) -> bool:
    return tree.is_dir()


def _remove_others(tree: Path) -> None:
    for other in tree.parent.glob("tree-*"):
        if other != tree:
            shutil.rmtree(other, ignore_errors=True)


async def _unpack(archive: Path, tree: Path, *, uid: int, gid: int, count: int) -> None:
    fresh = tree.with_name(f"{tree.name}.new")
    await asyncio.to_thread(shutil.rmtree, fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    await unpack_into(archive, fresh, uid=uid, gid=gid, count=count)
    fresh.rename(tree)


async def unpack_into(archive: Path, directory: Path, *, uid: int = 0, gid: int = 0, count: int = 1 << 32) -> None:
    """All of the archive below an empty directory, owners shifted into the range, without devices and set-uid programs."""
    compression = ("--zstd",) if archive.suffix == ".zst" else ()
    words = ("tar", "--extract", *compression, "--numeric-owner", "--same-permissions", "--same-owner", "--file", str(archive))
    try:
        await run(*words, "--directory", str(directory), deadline_seconds=UNPACK_SECONDS)
    except AgentError as error:
        if "No space left" in error.message:
            raise AgentError("disk.full", error.message) from error
        raise
    await asyncio.to_thread(_shift, directory, uid, gid, count)


def _shift(tree: Path, uid: int, gid: int, count: int) -> None:
    """Owners into the range; device nodes and anything set-uid go, for nothing inside may be more than it is."""
    seen: set[int] = set()
    _own(tree, uid, gid, count, seen)
    for directory, subdirectories, names in os.walk(tree):
        for name in (*subdirectories, *names):
            _own(Path(directory) / name, uid, gid, count, seen)


def _own(path: Path, uid: int, gid: int, count: int, seen: set[int]) -> None:
    status = path.lstat()
    if stat.S_ISBLK(status.st_mode) or stat.S_ISCHR(status.st_mode):
        path.unlink()
        return
    if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
        if status.st_ino in seen:
            return
        seen.add(status.st_ino)
    owner = uid + (status.st_uid if status.st_uid < count else 0)
    group = gid + (status.st_gid if status.st_gid < count else 0)
    os.lchown(path, owner, group)
