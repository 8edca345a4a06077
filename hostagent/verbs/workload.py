"""Workloads: the images that one stands on, in the form in which its machine takes them.

The one rule: an image of a workload is never written and never copied for one machine; all machines of a host share it.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from hostagent.drivers.machine.protocol import MachineTraits, MountAttachment
from hostagent.protocol.errors import AgentError
from hostagent.protocol.wanted import WorkloadWanted
from hostagent.verbs import image
from hostagent.verbs.context import Agent
from hostagent.verbs.jobs import Job


def check(workload: WorkloadWanted | None, traits: MachineTraits) -> None:
    """Raises AgentError (`vm.invalid`, `vm.unsupported`) for what this kind of machine can never run."""
    if workload is None:
        if traits.needs_workload:
            raise AgentError("vm.unsupported", f"{traits.name} needs a workload: a command to run", retryable=False)
        return
    if not workload.argv or any("\0" in word for word in _words(workload)):
        raise AgentError("vm.invalid", "a workload has a command, without NUL bytes", retryable=False)
    paths = [mount.path for mount in workload.mounts]
    if len(set(paths)) != len(paths) or not all(_is_mountable(path) for path in paths):
        raise AgentError("vm.invalid", "every mount has an absolute path of its own, below the root", retryable=False)
    if len(workload.mounts) + 1 > traits.max_mounts:
        raise AgentError("vm.unsupported", f"{traits.name} takes {traits.max_mounts - 1} mounts", retryable=False)
    if traits.mount_form == "disk" and not workload.root_image_id:
        raise AgentError("vm.unsupported", "a workload in a VM needs an image with its root", retryable=False)


def _words(workload: WorkloadWanted) -> tuple[str, ...]:
    environment = workload.env | workload.secret_env
    return (*workload.argv, *environment, *environment.values())


def _is_mountable(path: str) -> bool:
    found = PurePosixPath(path)
    return found.is_absolute() and ".." not in found.parts and str(found) == path and path != "/" and "\0" not in path


async def attachments(
    agent: Agent, workload: WorkloadWanted | None, traits: MachineTraits, job: Job
) -> tuple[MountAttachment | None, tuple[MountAttachment, ...]]:
    """(root, mounts), ready to be handed over. Raises AgentError `image.missing`, `disk.full`."""
    if workload is None:
        return None, ()
    root = await _attach(agent, workload.root_image_id, "/", traits, job) if workload.root_image_id else None
    mounts = [await _attach(agent, mount.image_id, mount.path, traits, job) for mount in workload.mounts]
    return root, tuple(mounts)


async def _attach(agent: Agent, image_id: str, path: str, traits: MachineTraits, job: Job) -> MountAttachment:
    if traits.mount_form == "directory":
        return MountAttachment(source=image.directory_of(agent, image_id), path=path)
    job.step = "disks of images"
    return MountAttachment(source=await image.disk_of(agent, image_id), path=path, form="disk")
