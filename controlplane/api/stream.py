"""Streams between clients and hosts: console, log and ports of VMs, relayed by the watch that leases the host.

The one rule: this process speaks to the watch's local socket with a sealed ticket, never to a host.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import cast

from fastapi import Request, WebSocket
from sqlalchemy import exists, func, select
from starlette.websockets import WebSocketDisconnect

from controlplane.api import problems
from controlplane.api.call import RequestContext, Services, not_found
from controlplane.api.errors import StreamRefused, StreamUnavailable
from controlplane.api.frame import enter_project
from controlplane.api.session import authenticated
from controlplane.api.standing import Standing, standing_of
from controlplane.audit import service as audit
from controlplane.core import json
from controlplane.core.errors import BedplateError
from controlplane.core.ids import Kind, new_id
from controlplane.core.ticket import StreamTicket, issue
from controlplane.kernel.service import shard_of
from controlplane.models.vm import Vm
from controlplane.models.watch import WatchPresence, WatchShard

PROTOCOL = "bedplate"
_BEARER = "bearer."
_CONNECT_SECONDS = 20.0
_CHUNK_BYTES = 65_536
_AWAY = frozenset({"host.unreachable"})
_CLOSE_CODES = {401: 4401, 503: 1013}  # sign in again; try again later (RFC 6455's registry); any other: 4403

Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def open_stream(services: Services, ticket: StreamTicket) -> Pipe:
    """Bytes of a stream on a host, from the watch that holds it, or from another one when that does not answer.

    Raises StreamUnavailable (no watch or no host answers) and StreamRefused (the host said no).
    """
    for path in await _sockets(services, ticket.host_id):
        try:
            pipe = await asyncio.open_unix_connection(path)
        except OSError:
            continue
        return await _opened(services, ticket, pipe)
    raise StreamUnavailable("no watch answers")


async def _sockets(services: Services, host_id: str) -> list[str]:
    """Of the watch that leases the host's shard, then of the others that are present, then the shared name."""
    holds = exists().where(WatchShard.watch == WatchPresence.watch, WatchShard.id == shard_of(host_id))
    present = select(WatchPresence.socket).where(WatchPresence.present_until > func.now(), WatchPresence.socket != "")
    async with services.database.sessionmaker() as session:
        found = list(await session.scalars(present.order_by(holds.desc(), WatchPresence.watch)))
    return [*found, str(services.settings.watch.socket or services.settings.state_dir / "watch.sock")]


async def _opened(services: Services, ticket: StreamTicket, pipe: Pipe) -> Pipe:
    reader, writer = pipe
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            writer.write(json.dumps({"ticket": issue(services.sealer, services.clock, ticket)}) + b"\n")
            answer = json.loads(await reader.readline() or b"{}")
    except (OSError, TimeoutError, ValueError) as error:
        writer.close()
        raise StreamUnavailable("the watch of the host does not answer") from error
    assert isinstance(answer, dict)
    if answer.get("ok"):
        return reader, writer
    writer.close()
    code, message = str(answer.get("code")), str(answer.get("message"))
    if code in _AWAY:
        raise StreamUnavailable(message)
    raise StreamRefused(f"{code}: {message}")


def ticket_for(call: RequestContext, vm: Vm, ticket: StreamTicket) -> StreamTicket:
    """`ticket` for this VM on its host; raises StreamRefused while it has none."""
    if vm.host_id is None:
        raise StreamRefused(f"{vm.name} is on no host yet")
    return replace(ticket, user_id=call.actor.id, host_id=vm.host_id, object_id=vm.id)


def empty_ticket(kind: str, *, port: int = 0, tail_bytes: int = 0, follow: bool = False) -> StreamTicket:
    """What is asked for, before it is known of which VM."""
    assert kind in ("console", "log", "tcp")
    return StreamTicket(user_id="", host_id="", kind=kind, object_id="", port=port, tail_bytes=tail_bytes, follow=follow)


async def chunks(pipe: Pipe) -> AsyncGenerator[bytes]:
    """What the host sends, until its end; closing the iterator closes the stream."""
    reader, writer = pipe
    try:
        while chunk := await reader.read(_CHUNK_BYTES):
            yield chunk
    finally:
        writer.close()


async def relay_socket(websocket: WebSocket, vm: str, action: str, wanted: StreamTicket) -> None:
    """Answer a WebSocket with a stream of a VM: binary messages both ways. Refusals are problem+json, before the upgrade."""
    services: Services = websocket.app.state.services
    request_id = new_id(Kind.REQUEST)
    try:
        ticket, standing = await _admitted(websocket, request_id, vm, action, wanted)
        pipe = await open_stream(services, ticket)
    except BedplateError as error:
        await websocket.send_denial_response(problems.render(error, request_id))
        return
    offered = websocket.headers.get("sec-websocket-protocol", "")
    await websocket.accept(subprotocol=PROTOCOL if PROTOCOL in offered.replace(" ", "").split(",") else None)
    await _pump(websocket, pipe, standing)


async def _admitted(
    websocket: WebSocket, request_id: str, vm: str, action: str, wanted: StreamTicket
) -> tuple[StreamTicket, Standing]:
    """Authenticate, authorise, write the audit row; raises what the frame raises for a request."""
    services: Services = websocket.app.state.services
    authorization = _authorization(websocket)
    async with services.database.sessionmaker() as session:
        call = RequestContext(
            services=services,
            session=session,
            request=cast("Request", websocket),
            request_id=request_id,
            actor=await authenticated(services, session, websocket, authorization=authorization),
            action=action,
            is_write=False,
        )
        await enter_project(call, is_named=True)
        row = await call.find(Vm, vm)
        if row is None:
            raise not_found(Vm, vm)
        ticket = ticket_for(call, row, wanted)
        await audit.record(
            session,
            call.actor,
            action,
            subject_kind="vm",
            subject_id=row.id,
            project_id=row.project_id,
            request_id=request_id,
        )
        await session.commit()
    return ticket, replace(standing_of(call), authorization=authorization)


def _authorization(websocket: WebSocket) -> str | None:
    """The header, or for browsers, which cannot set it, the subprotocol `bearer.<token>`."""
    for offered in websocket.headers.get("sec-websocket-protocol", "").split(","):
        if offered.strip().startswith(_BEARER):
            return f"Bearer {offered.strip().removeprefix(_BEARER)}"
    return websocket.headers.get("authorization")


async def _pump(websocket: WebSocket, pipe: Pipe, standing: Standing) -> None:
    """Bytes both ways until one side ends, or the right does: the close code then says why."""
    _, writer = pipe

    async def outward() -> None:
        while True:
            message = await websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            writer.write(message.get("bytes") or (message.get("text") or "").encode())
            await writer.drain()

    async def inward() -> None:
        async for chunk in chunks(pipe):
            await websocket.send_bytes(chunk)

    lost = asyncio.create_task(standing.lost())
    tasks = [asyncio.create_task(outward()), asyncio.create_task(inward())]
    await asyncio.wait([*tasks, lost], return_when=asyncio.FIRST_COMPLETED)
    refusal = lost.result() if lost.done() else None
    for task in (*tasks, lost):
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception) and not isinstance(outcome, ConnectionError | WebSocketDisconnect | RuntimeError):
            raise outcome
    writer.close()
    with contextlib.suppress(RuntimeError):
        if refusal is None:
            await websocket.close()
        else:
            await websocket.close(_CLOSE_CODES.get(refusal.status, 4403), refusal.code)
