"""Artifacts on the control plane's side: taken from an operator or fetched once, verified, kept under their digest.

The one rule: a file gets its name only after its digest and its architecture were checked; half a file leaves nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

import httpx2
from sqlalchemy import case, func, select, tuple_
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.artifact import StoredArtifact
from controlplane.resources.host.errors import (
    ArtifactMismatch,
    ArtifactTooLarge,
    ArtifactUnknown,
    ArtifactUnreachable,
    ArtifactWrongArchitecture,
)
from provisioning.artifacts import Artifact, architecture_of, load

MAX_BYTES = 1 << 30
FETCH_SECONDS = 600.0
CONNECT_SECONDS = 10.0


def shipped() -> tuple[Artifact, ...]:
    """The artifacts that the control plane itself must hold; packages come from the host's distribution."""
    return tuple(artifact for artifact in load() if artifact.source != "package")


def named(name: str) -> Artifact:
    """Raises ArtifactUnknown."""
    for artifact in shipped():
        if artifact.name == name:
            return artifact
    raise ArtifactUnknown(f"no artifact {name}: there are {', '.join(item.name for item in shipped())}")


class ArtifactStore:
    """`<state_dir>/artifacts/<sha256>`."""

    def __init__(self, state_dir: Path) -> None:
        self.directory = state_dir / "artifacts"

    def path(self, sha256: str) -> Path:
        return self.directory / sha256

    async def take(self, artifact: Artifact, chunks: AsyncIterator[bytes], *, sha256: str) -> int:
        """The size of what arrived. Raises ArtifactMismatch, ArtifactWrongArchitecture, ArtifactTooLarge."""
        if artifact.sha256 and artifact.sha256 != sha256:
            raise ArtifactMismatch(f"{artifact.name} {artifact.version} has sha256 {artifact.sha256}, not {sha256}")
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".part-", dir=self.directory)
        part = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                digest, size = hashlib.sha256(), 0
                async for chunk in chunks:
                    size += len(chunk)
                    if size > MAX_BYTES:
                        raise ArtifactTooLarge(f"{artifact.name} has more than {MAX_BYTES} bytes")
                    digest.update(chunk)
                    await asyncio.to_thread(stream.write, chunk)
                await asyncio.to_thread(_flush, stream)
            await asyncio.to_thread(self._keep, artifact, part, (digest.hexdigest(), sha256), size)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)  # noqa: PTH108 - one system call, also when the task is cancelled
        return size

    def _keep(self, artifact: Artifact, part: Path, digests: tuple[str, str], size: int) -> None:
        _check(artifact, part, *digests, size)
        part.chmod(0o755)
        part.rename(self.path(digests[1]))

    async def fetch(self, artifact: Artifact) -> int:
        """Download by its URL, once. Raises ArtifactUnreachable and what `take` raises."""
        if self.path(artifact.sha256).exists():
            return self.path(artifact.sha256).stat().st_size
        timeout = httpx2.Timeout(FETCH_SECONDS, connect=CONNECT_SECONDS)
        try:
            async with (
                httpx2.AsyncClient(timeout=timeout, follow_redirects=True) as client,
                _answer(client, artifact) as answer,
            ):
                return await self.take(artifact, answer.aiter_bytes(), sha256=artifact.sha256)
        except httpx2.TransportError as error:
            words = f"{artifact.name} cannot be fetched from {artifact.url}: {error or type(error).__name__}"
            raise ArtifactUnreachable(f"{words}. Give it by --artifact-dir") from error


@contextlib.asynccontextmanager
async def _answer(client: httpx2.AsyncClient, artifact: Artifact) -> AsyncIterator[httpx2.Response]:
    async with client.stream("GET", artifact.url) as answer:
        if not answer.is_success:
            raise ArtifactUnreachable(f"{artifact.url} answered {answer.status_code}")
        yield answer


def _flush(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _check(artifact: Artifact, part: Path, found: str, expected: str, size: int) -> None:
    if found != expected:
        raise ArtifactMismatch(f"{size} bytes with sha256 {found} arrived of {artifact.name}, not those with {expected}")
    built_for = architecture_of(part)
    if artifact.architecture not in ("any", built_for):
        words = built_for or "not a program"
        raise ArtifactWrongArchitecture(f"{artifact.name} is {words}, {artifact.architecture} is needed")


async def record(session: AsyncSession, artifact: Artifact, *, sha256: str, size_bytes: int) -> StoredArtifact:
    """The row that says which file of this artifact hosts get from now on."""
    values = {
        "name": artifact.name,
        "version": artifact.version,
        "architecture": artifact.architecture,
        "file": artifact.file,
        "sha256": sha256,
        "size_bytes": size_bytes,
    }
    row_id = f"{artifact.name}-{artifact.architecture}"
    statement = insert(StoredArtifact).values(id=row_id, **values)
    known, given = StoredArtifact, statement.excluded
    is_other = tuple_(known.sha256, known.file).is_distinct_from(tuple_(given.sha256, given.file))
    raised = {"number": known.number + case((is_other, 1), else_=0), "updated_at": func.now()}
    await session.execute(statement.on_conflict_do_update(index_elements=["id"], set_=values | raised))
    return await session.get_one(StoredArtifact, row_id, populate_existing=True)


async def stored(session: AsyncSession, architecture: str = "") -> dict[str, StoredArtifact]:
    """What the control plane holds (for one architecture), by name."""
    query = select(StoredArtifact)
    if architecture:
        query = query.where(StoredArtifact.architecture == architecture)
    return {row.name: row for row in await session.scalars(query.order_by(StoredArtifact.id))}
