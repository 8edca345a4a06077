"""An image as a disk: a read-only ext4 file system with its files, made once for its content and shared by every VM.

The one rule: the file's name is the digest of what is in it, and a file that has its name is complete.
Source: mke2fs(8); ext4 without a journal, so that mounting it read-only writes nothing and needs no recovery.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from hostagent.drivers.machine.tree import ARCHIVES, unpack_into
from hostagent.lib import files
from hostagent.lib.program import run
from hostagent.protocol.errors import AgentError
from hostagent.protocol.wanted import ImageWanted

MKE2FS = "/usr/sbin/mke2fs"
DEBUGFS = "/usr/sbin/debugfs"
FORMAT = 1
BLOCK_BYTES = 4096
INODE_BYTES = 256
SLACK_BYTES = 8 << 20
MAKE_SECONDS = 3600.0
_SUFFIX = ".ext4"


def disk_digest(image: ImageWanted) -> str:
    """Of the image's content alone: images of equal files share one disk."""
    content = [[file.name, file.sha256] for file in sorted(image.files, key=lambda file: file.name)]
    return hashlib.sha256(json.dumps([FORMAT, content]).encode()).hexdigest()


def disk_path(directory: Path, image: ImageWanted) -> Path:
    return directory / f"{disk_digest(image)}{_SUFFIX}"


async def make_disk(directory: Path, image: ImageWanted, image_directory: Path) -> Path:
    """The image's disk below `directory`, made now if it is not there; one at a time for each digest (the caller's lock).

    An image with a root archive becomes the tree in it, any other the files themselves. Raises AgentError `disk.full`.
    """
    disk = disk_path(directory, image)
    if disk.exists():
        return disk
    directory.mkdir(parents=True, exist_ok=True, mode=0o755)
    work = disk.with_suffix(".new")
    await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)
    work.mkdir(mode=0o700)
    try:
        archive = next((image_directory / name for name in ARCHIVES if (image_directory / name).is_file()), None)
        tree = image_directory
        if archive is not None:
            tree = work / "tree"
            tree.mkdir(mode=0o755)
            await unpack_into(archive, tree)
        fresh = work / "disk"
        await _make(tree, fresh, disk.stem)
        await asyncio.to_thread(_settle, fresh, disk)
    finally:
        with contextlib.suppress(OSError):
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, work, ignore_errors=True))
    return disk


def remove_unwanted(directory: Path, images: Iterable[ImageWanted]) -> None:
    """Every disk, whole or half, that none of these images is; absent is success."""
    wanted = {disk_digest(image) for image in images}
    for entry in directory.iterdir() if directory.is_dir() else ():
        if entry.stem in wanted:
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


async def _make(tree: Path, target: Path, digest: str) -> None:
    size_bytes, inodes = await asyncio.to_thread(_measure, tree)
    status = os.statvfs(target.parent)
    if (free := status.f_bavail * status.f_frsize) < size_bytes - SLACK_BYTES:
        raise AgentError("disk.full", f"the image's disk needs {size_bytes} bytes, {free} are free", needed_bytes=size_bytes)
    with target.open("wb") as opened:
        opened.truncate(size_bytes)
    identity = str(uuid.uuid5(uuid.NAMESPACE_OID, digest))
    options = f"root_owner=0:0,nodiscard,hash_seed={identity}"
    words = (MKE2FS, "-q", "-F", "-t", "ext4", "-O", "^has_journal,^resize_inode", "-m", "0", "-b", str(BLOCK_BYTES))
    words += ("-I", str(INODE_BYTES), "-N", str(inodes), "-L", digest[:16], "-U", identity, "-E", options)
    try:
        await run(*words, "-d", str(tree), str(target), deadline_seconds=MAKE_SECONDS)
        await run(DEBUGFS, "-w", "-R", "rmdir lost+found", str(target))
    except AgentError as error:
        if "No space left" in error.message:
            raise AgentError("disk.full", error.message) from error
        raise


def _measure(tree: Path) -> tuple[int, int]:
    """(bytes, inodes) that surely suffice; what is not used stays a hole in the file."""
    blocks, inodes = 0, 16
    for directory, subdirectories, names in os.walk(tree):
        inodes += len(subdirectories) + len(names)
        blocks += 1 + len(subdirectories) + (len(subdirectories) + len(names)) // 64
        for name in names:
            status = (Path(directory) / name).lstat()
            blocks += -(-status.st_size // BLOCK_BYTES) + 1
    data = blocks * BLOCK_BYTES + inodes * INODE_BYTES
    size = data + data // 32 + SLACK_BYTES
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES, inodes


def _settle(fresh: Path, disk: Path) -> None:
    descriptor = os.open(fresh, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fresh.chmod(0o444)
    fresh.rename(disk)
    files.sync_directory(disk.parent)
