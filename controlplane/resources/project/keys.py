"""A project's key-encryption key, and the keys of volumes under it.

The one rule: a data key is in the clear only inside one function call; what is stored is wrapped, and the key that opens the
wrap is sealed under the master key.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Collection, Sequence
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_der_private_key,
    load_pem_public_key,
)
from sqlalchemy import delete, exists, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.ids import Kind, new_id
from controlplane.core.sealing import Sealer
from controlplane.models.project_key import ProjectKey, VolumeKey, VolumeKeyUse

_BITS = 3072
_EXPONENT = 65537


def seal_context(key_id: str) -> str:
    return f"project_key:{key_id}"


async def ensure_key(session: AsyncSession, sealer: Sealer, project_id: str) -> ProjectKey:
    """The project's present key, made at its first volume. Of two makers at once the first wins."""
    found = await _present(session, project_id)
    if found is None:
        values = await _made(sealer, project_id)
        await session.execute(insert(ProjectKey).values(**values).on_conflict_do_nothing())
        found = await _present(session, project_id)
        assert found is not None
    return found


async def _present(session: AsyncSession, project_id: str) -> ProjectKey | None:
    query = select(ProjectKey).where(ProjectKey.project_id == project_id, ProjectKey.retired_at.is_(None))
    return await session.scalar(query)


async def _made(sealer: Sealer, project_id: str) -> dict[str, Any]:
    key_id = new_id(Kind.PROJECT_KEY)
    private = await asyncio.to_thread(rsa.generate_private_key, _EXPONENT, _BITS)
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    plain = private.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    sealed = sealer.seal(plain, context=seal_context(key_id))
    return {"id": key_id, "project_id": project_id, "public_key": public, "private_sealed": sealed}


async def needed_by(session: AsyncSession, subject_id: str, source_id: str | None) -> set[str]:
    """The keys that a volume or snapshot may need: its own, those it is known to use, and those of what it is made of.

    A host's word widens none of it: else one host could fetch, or overwrite, the keys of another's volumes.
    """
    of = [subject_id, source_id] if source_id else [subject_id]
    used = await session.scalars(select(VolumeKeyUse.key_id).where(VolumeKeyUse.subject_id.in_(of)))
    return {subject_id, *used}


async def record(session: AsyncSession, subject_id: str, source_id: str | None, told: Sequence[Any]) -> None:
    """What a host says that a volume or snapshot needs: each key once, under a project's key that we have."""
    allowed = await needed_by(session, subject_id, source_id)
    keys = sorted(
        (item for item in told if item.get("wrapped") and str(item["id"]) in allowed), key=lambda item: str(item["id"])
    )
    wanted = {str(item["kek_id"]) for item in keys}
    known = set(await session.scalars(select(ProjectKey.id).where(ProjectKey.id.in_(wanted), ProjectKey.retired_at.is_(None))))
    for item in keys:
        if item["kek_id"] in known:
            values = {"project_key_id": str(item["kek_id"]), "wrapped": str(item["wrapped"])}
            made = insert(VolumeKey).values(id=str(item["id"]), **values)
            await session.execute(made.on_conflict_do_update(index_elements=[VolumeKey.id], set_=values))
    stored = set(await session.scalars(select(VolumeKey.id).where(VolumeKey.id.in_({str(item["id"]) for item in keys}))))
    for key_id in sorted(stored):
        await session.execute(insert(VolumeKeyUse).values(subject_id=subject_id, key_id=key_id).on_conflict_do_nothing())


async def forget(session: AsyncSession, subject_id: str) -> None:
    """The volume or snapshot is gone. A key that nothing needs any more goes too: what it encrypted is noise from then."""
    held = select(VolumeKey.id).where(
        VolumeKey.id.in_(select(VolumeKeyUse.key_id).where(VolumeKeyUse.subject_id == subject_id))
    )
    await session.execute(held.order_by(VolumeKey.id).with_for_update())  # of two that leave at once the later one takes it
    mine = delete(VolumeKeyUse).where(VolumeKeyUse.subject_id == subject_id).returning(VolumeKeyUse.key_id)
    key_ids = list(await session.scalars(mine))
    needed = exists().where(VolumeKeyUse.key_id == VolumeKey.id)
    await session.execute(delete(VolumeKey).where(VolumeKey.id.in_(key_ids), ~needed))


async def sealed_to(
    session: AsyncSession, sealer: Sealer, key_ids: Collection[str], public_key: str
) -> tuple[list[tuple[str, str]], list[str]]:
    """Those keys on their way to a host, as (id, sealed for `volume.unlock`), and the ids of which nothing is known."""
    rows = {row.id: row for row in await session.scalars(select(VolumeKey).where(VolumeKey.id.in_(key_ids)))}
    sealed = []
    for key_id in sorted(rows):
        plain = await _unwrapped(session, sealer, rows[key_id])
        sealed.append((key_id, _wrap(public_key, plain, label=f"unlock:{key_id}")))
    return sealed, sorted(set(key_ids) - set(rows))


async def rotate(session: AsyncSession, sealer: Sealer, project_id: str) -> ProjectKey:
    """A new key for the project: every volume's key is wrapped anew here and now, and the old one is gone. No data moves."""
    old_query = select(ProjectKey).where(ProjectKey.project_id == project_id).with_for_update()
    old = list(await session.scalars(old_query.order_by(ProjectKey.id)))
    for row in old:
        row.retired_at = row.retired_at or func.now()
    await session.flush()
    new = ProjectKey(**await _made(sealer, project_id))
    session.add(new)
    await session.flush()
    query = select(VolumeKey).where(VolumeKey.project_key_id.in_([row.id for row in old])).order_by(VolumeKey.id)
    for row in await session.scalars(query.with_for_update()):
        plain = await _unwrapped(session, sealer, row)
        row.wrapped, row.project_key_id = _wrap(new.public_key, plain, label=f"volume-key:{row.id}"), new.id
    await session.flush()
    await session.execute(delete(ProjectKey).where(ProjectKey.id.in_([row.id for row in old])))
    return new


async def _unwrapped(session: AsyncSession, sealer: Sealer, row: VolumeKey) -> bytes:
    """The data key; raises SealBroken under another master key, ValueError for a wrap that was altered."""
    holder = await session.get_one(ProjectKey, row.project_key_id)
    private = load_der_private_key(sealer.open(holder.private_sealed, context=seal_context(holder.id)), password=None)
    assert isinstance(private, rsa.RSAPrivateKey)
    return private.decrypt(base64.b64decode(row.wrapped), _padding(f"volume-key:{row.id}"))


def _wrap(public_key: str, plain: bytes, *, label: str) -> str:
    key = load_pem_public_key(public_key.encode())
    assert isinstance(key, rsa.RSAPublicKey)
    return base64.b64encode(key.encrypt(plain, _padding(label))).decode()


def _padding(label: str) -> padding.OAEP:
    """RSA-OAEP with SHA-256 (RFC 8017, section 7.1); the label binds a wrap to its key and purpose."""
    return padding.OAEP(mgf=padding.MGF1(hashes.SHA256()), algorithm=hashes.SHA256(), label=label.encode())
