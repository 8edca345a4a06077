"""Planning documents of hosts. The one rule: only a changed document gets a new generation and wakes its host's run."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from sqlalchemy import and_, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core import json
from controlplane.core.json import Json
from controlplane.core.sealing import Sealer
from controlplane.kernel import service as kernel
from controlplane.models.host import Host
from controlplane.models.host_document import HostDocument
from hostagent.protocol import codec
from hostagent.protocol.network import NoticesWanted
from hostagent.protocol.verbs import ENSURE
from hostagent.protocol.wanted import Generation

PROGRAM = "host_documents"
UNPLANNED = Generation(epoch=0, number=0)
"""The generation in a document that is being planned; the row gives it its own when it is said."""

Document = TypeVar("Document")


async def plan(session: AsyncSession, host_id: str, kind: str, document: Any) -> bool:
    """Write down that the host shall have this wanted document (of any generation); True when that is a change."""
    body = _body(document)
    changed = (
        insert(HostDocument)
        .values(host_id=host_id, kind=kind, object_id=document.id, document=body, digest=_digest(body))
        .on_conflict_do_update(
            index_elements=[HostDocument.host_id, HostDocument.kind, HostDocument.object_id],
            set_={
                "document": body,
                "digest": _digest(body),
                "generation": HostDocument.generation + 1,
                "is_wanted": True,
                "failure": "",
                "detail": "",
                "updated_at": func.now(),
            },
            where=or_(HostDocument.digest != _digest(body), HostDocument.is_wanted.is_(False)),
        )
        .returning(HostDocument.host_id)
    )
    if await session.scalar(changed) is None:
        return False
    await kernel.start(session, PROGRAM, host_id, host_id=host_id)
    return True


async def withdraw(
    session: AsyncSession, kind: str, object_id: str, *, keep: Collection[str] = (), is_final: bool = False
) -> bool:
    """Take the document off every host but those of `keep`; True when one had it. `is_final`: the object is gone for good."""
    here = and_(HostDocument.kind == kind, HostDocument.object_id == object_id, HostDocument.host_id.not_in(list(keep)))
    values: dict[str, Any] = {
        "is_wanted": False,
        "is_final": is_final,
        "generation": HostDocument.generation + 1,
        "failure": "",
        "detail": "",
    }
    is_news = HostDocument.is_wanted if not is_final else HostDocument.is_final.is_(False)
    rows = await session.scalars(update(HostDocument).where(here, is_news).values(**values).returning(HostDocument.host_id))
    host_ids = sorted(rows)
    for host_id in host_ids:
        await kernel.start(session, PROGRAM, host_id, host_id=host_id)
    return bool(host_ids)


async def pending(session: AsyncSession, kind: str, object_id: str) -> Sequence[HostDocument]:
    """The documents of an object that hosts have not carried out yet."""
    here = HostDocument.kind == kind, HostDocument.object_id == object_id
    query = select(HostDocument).where(*here, HostDocument.applied_generation < HostDocument.generation)
    return list(await session.scalars(query.order_by(HostDocument.host_id).execution_options(populate_existing=True)))


async def is_carried_out(session: AsyncSession, kind: str, object_id: str) -> bool:
    """Whether every host that is not lost has the present document."""
    waiting = [row.host_id for row in await pending(session, kind, object_id)]
    if not waiting:
        return True
    query = select(func.count()).select_from(Host).where(Host.id.in_(waiting), Host.link != "lost")
    return await session.scalar(query) == 0


async def missing_on(session: AsyncSession, host_id: str, objects: Collection[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """Which of the (kind, object id) the host has not carried out in their present form."""
    here = HostDocument.host_id == host_id, HostDocument.applied_generation == HostDocument.generation
    query = select(HostDocument.kind, HostDocument.object_id).where(*here, HostDocument.is_wanted)
    applied = {(row[0], row[1]) for row in await session.execute(query)}
    return sorted(set(objects) - applied)


def restored(row: HostDocument, epoch: int) -> Any:
    """The wanted document of a row, with its generation."""
    document = codec.decode(ENSURE[f"{row.kind}.ensure"], {**row.document, "generation": {"epoch": 0, "number": 0}})
    return replace(document, generation=Generation(epoch=epoch, number=row.generation))


def keyed(document: NoticesWanted, sealer: Sealer) -> NoticesWanted:
    """With the keys of each pair of hosts, the same on both sides, derived from the master key."""
    peers = tuple(replace(peer, key=_pair_key(sealer, document.host_id, peer.host_id)) for peer in document.peers)
    return replace(document, peers=peers)


def _pair_key(sealer: Sealer, one: str, other: str) -> str:
    first, second = sorted((one, other))
    return sealer.derive(context=f"notices:{first}:{second}").hex()


def _body(document: Any) -> dict[str, Json]:
    body = codec.encode(document)
    del body["generation"]
    return body


def _digest(body: dict[str, Json]) -> str:
    return hashlib.sha256(json.canonical(body)).hexdigest()
