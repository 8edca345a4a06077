"""Tickets for streams to hosts: sealed for a user, an object and 60 s, made by the API and redeemed by the watch.

The one rule: a ticket says everything; whoever redeems it asks nobody else. It cannot be read or altered without the
deployment's master key.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from dataclasses import asdict, dataclass
from typing import Literal

from controlplane.core import json
from controlplane.core.clock import Clock
from controlplane.core.sealing import SealBroken, Sealer

TICKET_SECONDS = 60
_CONTEXT = "stream.ticket"


class TicketRefused(ValueError):
    """Altered, made by another deployment, or too old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTicket:
    """`user_id` for the audit; `object_id` a VM; `port` for `tcp`; `tail_bytes` and `follow` for `log`."""

    user_id: str
    host_id: str
    kind: Literal["console", "log", "tcp"]
    object_id: str
    port: int = 0
    tail_bytes: int = 0
    follow: bool = False
    nonce: str = ""
    expires_at: float = 0.0


def issue(sealer: Sealer, clock: Clock, ticket: StreamTicket) -> str:
    body = asdict(ticket)
    body |= {"nonce": secrets.token_hex(8), "expires_at": clock.now().timestamp() + TICKET_SECONDS}
    return base64.urlsafe_b64encode(sealer.seal(json.dumps(body), context=_CONTEXT)).decode()


def redeem(sealer: Sealer, clock: Clock, text: str) -> StreamTicket:
    """Raises TicketRefused. That a ticket is used once is the redeemer's to see, by its `nonce`."""
    try:
        body = json.loads(sealer.open(base64.urlsafe_b64decode(text), context=_CONTEXT))
    except (ValueError, binascii.Error, SealBroken) as error:
        raise TicketRefused("the ticket is not one of ours") from error
    assert isinstance(body, dict)
    ticket = StreamTicket(**body)  # pyright: ignore[reportArgumentType] - sealed by us
    if clock.now().timestamp() > ticket.expires_at:
        raise TicketRefused("the ticket is too old")
    return ticket
