"""Images: content-addressed files on the host, shared between images, verified before they get their name.

The one rule: `blobs/<sha256>` exists only when its bytes were checked; an image is a directory of hard links into it.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from pathlib import Path, PurePosixPath

from hostagent.drivers.machine import imagedisk
from hostagent.lib import files
from hostagent.lib.paths import Paths
from hostagent.protocol.errors import AgentError
from hostagent.protocol.results import Outcome, Running, Succeeded
from hostagent.protocol.verbs import ObjectObserved, Subject
from hostagent.protocol.wanted import FileWanted, ImageWanted, Observed, Purge
from hostagent.verbs import lifecycle
from hostagent.verbs.context import Agent
from hostagent.verbs.jobs import Job, Result

_SHA256 = re.compile(r"[0-9a-f]{64}")
_RESERVED = frozenset({"sha256", "incoming", "disk"})
_NOT_PROGRAMS = frozenset({"agent"})  # what else lies where artifacts are installed


class ImageKind:
    name = "image"

    def check(self, agent: Agent, document: ImageWanted) -> None:
        del agent
        names = [file.name for file in document.files]
        is_agents = document.purpose == "artifact" and document.id in _NOT_PROGRAMS
        if is_agents or document.id in _RESERVED or len(set(names)) != len(names):
            raise AgentError("image.invalid", "a reserved id, or two files of one name", retryable=False)
        for file in document.files:
            path = PurePosixPath(file.name)
            if path.is_absolute() or not path.parts or ".." in path.parts or str(path) != file.name or "\0" in file.name:
                raise AgentError("image.invalid", f"{file.name[:80]!r} is not a relative name", retryable=False)
            if not _SHA256.fullmatch(file.sha256) or file.size_bytes < 0:
                raise AgentError("image.invalid", f"{file.name}: not a digest and size", retryable=False)

    async def apply(self, agent: Agent, document: ImageWanted, job: Job) -> Result:
        missing = missing_files(agent, document)
        if missing:
            _check_space(agent, missing)
            return Running(step="upload", needs=tuple(dict.fromkeys(file.sha256 for file in missing)))
        job.step = "linking"
        await asyncio.to_thread(_assemble, agent.paths.blobs, agent.paths.image_directory(document.id), document)
        if document.purpose == "artifact":
            await asyncio.to_thread(_install_programs, agent.paths, document)
        return Succeeded(observed={"state": "present", "path": str(agent.paths.image_directory(document.id))})

    async def remove(self, agent: Agent, object_id: str, document: ImageWanted | None) -> None:
        user = _user_of(agent, object_id)
        if user:
            raise AgentError("image.in_use", f"{object_id} is used by {user}", user=user)
        others = [image for image in agent.documents.all("image") if image.id != object_id]
        wanted = {file.sha256 for image in others for file in image.files}
        await asyncio.to_thread(_remove, agent.paths.image_directory(object_id), agent.paths.blobs, agent.paths.uploads, wanted)
        await asyncio.to_thread(imagedisk.remove_unwanted, agent.paths.image_disks, others)
        if document is not None and document.purpose == "artifact":
            programs = agent.paths.programs / document.id  # a process that runs one keeps it open
            await asyncio.to_thread(shutil.rmtree, programs, ignore_errors=True)

    async def observe(self, agent: Agent, object_id: str, document: ImageWanted | None) -> Observed | None:
        directory = agent.paths.image_directory(object_id)
        if document is None:
            is_here = directory.is_dir() and object_id not in _RESERVED
            return Observed(id=object_id, kind="image", generation=None, state="unknown") if is_here else None
        missing = missing_files(agent, document)
        state = "uploading" if missing else "present" if _is_assembled(agent.paths.blobs, directory, document) else "idle"
        detail: dict[str, str | int | float | bool | None] = {
            "path": str(directory),
            "missing_files": len(missing),
            "size_bytes": sum(file.size_bytes for file in document.files),
        }
        return Observed(id=object_id, kind="image", generation=document.generation, state=state, detail=detail)

    def is_settled(self, document: ImageWanted, observed: Observed | None) -> bool:
        """What waits for an upload is settled: nothing can be done here."""
        del document
        return observed is not None and observed.state in ("present", "uploading")

    async def found(self, agent: Agent) -> tuple[str, ...]:
        directory = agent.paths.blobs.parent
        if not directory.is_dir():
            return ()
        names = (entry.name for entry in directory.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        return tuple(sorted(set(names) - _RESERVED))


def _install_programs(paths: Paths, document: ImageWanted) -> None:
    """`/opt/bedplate/<name>/<sha256>/<file>`, executable; old versions stay for the machines that run them."""
    for file in document.files:
        target = paths.programs / document.id / file.sha256 / file.name
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        temporary = target.with_name(f".{target.name}.new")
        shutil.copyfile(paths.blobs / file.sha256, temporary)
        temporary.chmod(0o755)
        temporary.rename(target)


KIND = ImageKind()


async def ensure(agent: Agent, body: ImageWanted) -> Outcome:
    return await lifecycle.ensure(agent, KIND, body)


async def purge(agent: Agent, body: Purge) -> Outcome:
    return await lifecycle.purge(agent, KIND, body)


async def observe(agent: Agent, body: Subject) -> ObjectObserved:
    return await lifecycle.observe(agent, KIND, body)


def file_of(agent: Agent, image_id: str, name: str) -> Path:
    """The path of one file of a complete image, and of nothing else. Raises AgentError `image.missing` (retryable: it may
    still arrive).
    """
    path = directory_of(agent, image_id) / name
    document = agent.documents.get("image", image_id)
    is_its_own = document is not None and any(file.name == name for file in document.files)
    if not is_its_own or not path.is_file():
        raise AgentError("image.missing", f"image {image_id} has no file {name}", image=image_id, file=name)
    return path


def directory_of(agent: Agent, image_id: str) -> Path:
    """The directory of a complete image. Raises AgentError `image.missing`."""
    document, directory = agent.documents.get("image", image_id), agent.paths.image_directory(image_id)
    if document is None or not directory.is_dir():
        raise AgentError("image.missing", f"image {image_id} is not on this host", image=image_id)
    return directory


async def disk_of(agent: Agent, image_id: str) -> Path:
    """A complete image as a read-only disk, made at its first use. Raises AgentError `image.missing`, `disk.full`."""
    directory = directory_of(agent, image_id)
    document: ImageWanted = agent.documents.get("image", image_id)  # pyright: ignore[reportAssignmentType] - directory_of found it
    async with agent.disks.hold(imagedisk.disk_digest(document)):
        return await imagedisk.make_disk(agent.paths.image_disks, document, directory)


def missing_files(agent: Agent, document: ImageWanted) -> list[FileWanted]:
    return [file for file in document.files if not has_blob(agent, file)]


def has_blob(agent: Agent, file: FileWanted) -> bool:
    try:
        return (agent.paths.blobs / file.sha256).stat().st_size == file.size_bytes
    except FileNotFoundError:
        return False


def _check_space(agent: Agent, missing: list[FileWanted]) -> None:
    agent.paths.uploads.mkdir(parents=True, exist_ok=True)
    status = os.statvfs(agent.paths.uploads)
    free_bytes = status.f_bavail * status.f_frsize
    needed_bytes = 0
    for file in missing:
        partial = agent.paths.uploads / file.sha256
        needed_bytes += file.size_bytes - (partial.stat().st_size if partial.exists() else 0)
    if needed_bytes > free_bytes:
        raise AgentError(
            "disk.full",
            f"the image needs {needed_bytes} bytes, {free_bytes} are free",
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
        )


def _is_assembled(blobs: Path, directory: Path, document: ImageWanted) -> bool:
    try:
        return all((directory / file.name).samefile(blobs / file.sha256) for file in document.files) and directory.is_dir()
    except FileNotFoundError:
        return False


def _assemble(blobs: Path, directory: Path, document: ImageWanted) -> None:
    if _is_assembled(blobs, directory, document):
        return
    fresh, old = directory.with_name(f".{directory.name}.new"), directory.with_name(f".{directory.name}.old")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    with files.disk_errors(directory):
        fresh.mkdir(parents=True, mode=0o755)
        for file in document.files:
            target = fresh / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.hardlink_to(blobs / file.sha256)
            files.sync_directory(target.parent)
    if directory.exists():
        directory.rename(old)
    fresh.rename(directory)
    files.sync_directory(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def _remove(directory: Path, blobs: Path, uploads: Path, wanted: set[str]) -> None:
    """The image's directory, then every blob and half upload that no document names."""
    shutil.rmtree(directory, ignore_errors=True)
    for store in (blobs, uploads):
        if store.is_dir():
            for entry in store.iterdir():
                if entry.name not in wanted:
                    entry.unlink(missing_ok=True)


def _user_of(agent: Agent, image_id: str) -> str:
    for volume in agent.documents.all("volume"):
        if volume.image_id == image_id and not agent.documents.is_purged("volume", volume.id):
            return volume.id
    for vm in agent.documents.all("vm"):
        if image_id in vm.image_ids and not agent.documents.is_purged("vm", vm.id):
            return vm.id
    return ""
