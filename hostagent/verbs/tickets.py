"""Tickets for streams: valid once, for 60 s. The one rule: a stream opens only what an authorised verb has named before."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from hostagent.protocol.verbs import StreamRequest

TICKET_SECONDS = 60.0


class Tickets:
    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._open: dict[str, tuple[float, StreamRequest]] = {}

    def issue(self, request: StreamRequest) -> str:
        now = self._monotonic()
        self._open = {ticket: entry for ticket, entry in self._open.items() if entry[0] > now}
        ticket = secrets.token_hex(16)
        self._open[ticket] = (now + TICKET_SECONDS, request)
        return ticket

    def redeem(self, ticket: str) -> StreamRequest | None:
        """What the ticket was for; None when it is unknown, used or too old."""
        until, request = self._open.pop(ticket, (0.0, None))
        return request if until > self._monotonic() else None
