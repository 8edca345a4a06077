"""Turns what a host says into signals, incidents and the state of its link.

The one rule: the cursor is stored in the transaction that sends the signals, so nothing heard is lost, and hearing it twice
only makes a program look twice.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.events.service import emit
from controlplane.kernel import service as kernel
from controlplane.kernel.database import Database
from controlplane.kernel.incident import open_incident, resolve_incident
from controlplane.kernel.service import fetch
from controlplane.placement.wake import wake_waiting
from controlplane.remote.link import HostLinks
from controlplane.watch import queries
from controlplane.watch.holding import Holding
from hostagent.protocol.frames import Event
from hostagent.protocol.verbs import Cursor, HostObserved
from hostagent.protocol.wanted import Observed

SIGNAL = "host_event"
UNKNOWN_OBJECT = "host.unknown_object"
BROKEN_DOCUMENT = "host.broken_document"
UNOBSERVABLE = "host.unobservable_object"
HOST_RUNS = {"network": "host_routes", "tunnel": "host_tunnel"}


class Delivery:
    def __init__(self, database: Database) -> None:
        self._database = database

    def holding(self, host_id: str, links: HostLinks) -> Holding:
        """What renews the lease of the addresses that the host alone holds."""
        return Holding(host_id, links, self._database)

    async def cursor(self, host_id: str) -> Cursor:
        """Where to go on; an empty one for a host that was never heard."""
        row = await self._database.pool.fetchrow(queries.READ_CURSOR, host_id)
        return Cursor(log=row["log"], seq=row["seq"]) if row else Cursor()

    async def event(self, host_id: str, event: Event) -> None:
        """One event, and the cursor behind it."""
        body = event.body
        async with self._database.session() as session:
            if "kind" in body and "id" in body:
                said = {"event": event.event, "state": body.get("state"), "host_id": host_id}
                await self._signal(session, host_id, str(body["kind"]), str(body["id"]), said)
            elif event.event.startswith("host."):
                await kernel.signal(session, "host", host_id, SIGNAL, {"event": event.event})
            await fetch(session, queries.SAVE_CURSOR, host_id, event.log, event.seq)

    async def everything(self, host_id: str, observed: HostObserved) -> None:
        """After a reset, or at first sight: tell every program of an object on this host to look."""
        async with self._database.session() as session:
            told: set[tuple[str, str]] = set()
            for item in observed.objects:
                told.add((item.kind, item.id))
                await self._signal(session, host_id, item.kind, item.id, {"event": "observed", "state": item.state})
            for row in await fetch(session, queries.VMS_OF_HOST, host_id):
                if ("vm", row[0]) not in told:
                    await kernel.signal(session, "vm", row[0], SIGNAL, {"event": "observed", "state": "gone"})
            await kernel.signal(session, "host", host_id, SIGNAL, {"event": "observed", "boot_id": observed.boot_id})
            await self._strange(session, host_id, observed.objects)
            await fetch(session, queries.SAVE_CURSOR, host_id, observed.cursor.log, observed.cursor.seq)

    async def link(self, host_id: str, state: str, detail: str = "") -> None:
        """`up` or `lost`; a change wakes the host's program and those of its machines."""
        async with self._database.session() as session:
            if not await fetch(session, queries.SET_LINK, host_id, state):
                return
            await emit(session, f"host.link_{state}", "host", host_id, body={"detail": detail})
            await kernel.signal(session, "host", host_id, "link", {"state": state})
            for row in await fetch(session, queries.VMS_OF_HOST, host_id):
                await kernel.signal(session, "vm", row[0], "link", {"state": state})
            for row in await fetch(session, queries.HELD_BY_HOST, host_id):
                await kernel.signal(session, row[0], row[1], "link", {"state": state})
            if state == "up":
                for row in await fetch(session, queries.BALANCED_BY_EDGES, host_id):
                    await kernel.signal(session, "loadbalancer", row[0], "link", {"state": state})
                await kernel.signal(session, "host_routes", host_id, "link")
                await kernel.signal(session, "host_documents", host_id, "link")
                await kernel.signal(session, "host_tunnel", host_id, "link")
                await wake_waiting(session)

    async def key_changed(self, host_id: str, detail: str | None) -> None:
        """An incident while the host shows another key than the pinned one; None: it shows the right one."""
        async with self._database.session() as session:
            if detail is None:
                await resolve_incident(session, "host.key_changed", host_id, by="watch")
            else:
                await open_incident(session, "host.key_changed", host_id, detail)

    async def _signal(self, session: AsyncSession, host_id: str, kind: str, object_id: str, body: dict[str, Any]) -> None:
        """Programs are named as their nouns; an image's copy on a host and a host's routes have runs of their own."""
        if kind == "image":
            for row in await fetch(session, queries.COPIES, host_id, object_id):
                await kernel.signal(session, "image_copy", row[0], SIGNAL, body)
            return
        if kind in HOST_RUNS:
            await kernel.signal(session, HOST_RUNS[kind], host_id, SIGNAL, body)
            return
        await kernel.signal(session, kind, object_id, SIGNAL, body)

    async def _strange(self, session: AsyncSession, host_id: str, objects: tuple[Observed, ...]) -> None:
        for code, state, words in (
            (UNKNOWN_OBJECT, "unknown", "The host has objects that nobody asked for; nothing was removed"),
            (BROKEN_DOCUMENT, "broken", "The host cannot read documents it was given"),
            (UNOBSERVABLE, "unobservable", "The host cannot look at objects it was given"),
        ):
            found = sorted(f"{item.kind} {item.id}" for item in objects if item.state == state)
            if found:
                await open_incident(session, code, host_id, f"{words}: {', '.join(found[:20])}", {"objects": list(found)})
            else:
                await resolve_incident(session, code, host_id, by="watch")
