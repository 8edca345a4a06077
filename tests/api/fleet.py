"""Rows that API tests need below a VM: hosts, an available image, a network."""

from __future__ import annotations

import hashlib
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from controlplane.core.ids import Kind, new_id
from controlplane.models.host import Host
from controlplane.models.project import Project
from controlplane.resources.image import service as images
from controlplane.resources.image.schemas import ImageManifest
from controlplane.resources.network import service as networks
from controlplane.resources.network.schemas import NetworkCreate
from controlplane.settings import NetworkSettings

GIB = 1 << 30
FILES = {"root.raw": b"root" * 1000, "vmlinuz": b"kernel", "initramfs": b"initramfs"}


def manifest(name: str = "debian", **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "architecture": "x86_64",
        "root_file": "root.raw",
        "min_disk_bytes": 1 << 30,
        "min_memory_bytes": 128 << 20,
        "boot": {"kind": "kernel", "kernel_file": "vmlinuz", "initramfs_file": "initramfs", "cmdline": "quiet"},
        "files": [
            {"name": file, "sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}
            for file, content in FILES.items()
        ],
    } | changes


async def add_host(
    sessions: async_sessionmaker[AsyncSession], name: str = "a", *, cpus: int = 4, memory_bytes: int = 8 * GIB
) -> str:
    async with sessions.begin() as session:
        host = Host(
            id=new_id(Kind.HOST),
            name=name,
            address=f"{name}.test",
            state="ready",
            facts={},
            facts_at=func.now(),
            ssh_key_sealed=b"sealed",
            ssh_public_key="ssh-ed25519 AAAA",
            architecture="x86_64",
            machine_drivers=["fake"],
            tunnel_driver="kernel",
            allocatable_vcpus=cpus,
            allocatable_memory_bytes=memory_bytes,
        )
        session.add(host)
    return host.id


async def lay_ground(sessions: async_sessionmaker[AsyncSession]) -> None:
    """Image `debian` and network `net` of project `ours`."""
    async with sessions.begin() as session:
        image = await images.create(session, ImageManifest.model_validate(manifest()))
        for file in manifest()["files"]:
            await images.record_blob(session, file["sha256"], file["size_bytes"])
        await images.settle(session, image)
        project_id = (await session.scalars(select(Project.id).where(Project.name == "ours"))).one()
        await networks.create(session, NetworkSettings(), project_id, NetworkCreate(name="net"))
