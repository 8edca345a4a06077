"""Changes of providers. The one rule: the key is sealed before it is stored, bound to its provider."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.errors import FieldError
from controlplane.core.ids import Kind, new_id
from controlplane.core.sealing import Sealer
from controlplane.models.project import Project
from controlplane.models.provider import Provider
from controlplane.resources.key.publish import publish
from controlplane.resources.provider.errors import ProviderProjectUnknown
from controlplane.resources.provider.schemas import ProviderCreate, ProviderUpdate


async def create(session: AsyncSession, sealer: Sealer, wanted: ProviderCreate) -> Provider:
    """Raises ProviderProjectUnknown."""
    provider = Provider(
        id=new_id(Kind.PROVIDER),
        name=wanted.name,
        kind=wanted.kind,
        base_url=wanted.base_url,
        models=wanted.models,
        project_ids=await _projects(session, wanted.projects),
    )
    _seal(provider, sealer, wanted.key.get_secret_value())
    session.add(provider)
    await publish(session, "routes")
    return provider


async def change(session: AsyncSession, sealer: Sealer, provider: Provider, wanted: ProviderUpdate) -> None:
    """Raises ProviderProjectUnknown."""
    given = wanted.model_fields_set
    if "base_url" in given:
        provider.base_url = wanted.base_url
    if "models" in given:
        provider.models = wanted.models
    if "projects" in given:
        provider.project_ids = await _projects(session, wanted.projects)
    if wanted.key is not None:
        _seal(provider, sealer, wanted.key.get_secret_value())
    provider.generation += 1
    await publish(session, "routes")


async def remove(session: AsyncSession, provider: Provider) -> None:
    """Raises ProviderInUse by its constraint."""
    await session.delete(provider)
    await publish(session, "routes")


def _seal(provider: Provider, sealer: Sealer, key: str) -> None:
    provider.sealed_key = sealer.seal(key.encode(), context=f"provider.key:{provider.id}")
    provider.hint = key[-4:] if len(key) >= 16 else ""


async def _projects(session: AsyncSession, refs: Sequence[str] | None) -> list[str] | None:
    if refs is None:
        return None
    rows = (
        await session.execute(select(Project.id, Project.name).where(or_(Project.id.in_(refs), Project.name.in_(refs))))
    ).all()
    found = {ref: row.id for row in rows for ref in (row.id, row.name)}
    for index, ref in enumerate(refs):
        if ref not in found:
            raise ProviderProjectUnknown(
                f"no project {ref}", errors=(FieldError(pointer=f"/projects/{index}", detail="unknown"),)
            )
    return [found[ref] for ref in refs]
