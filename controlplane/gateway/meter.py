"""One request's account: opened before it leaves, kept up while tokens flow, closed once on every way out.

The one rule: what is billed follows from how the request ended, here and nowhere else (reference: accounting table).
"""

from __future__ import annotations

import logging
import time

from controlplane.gateway.family import Tokens
from controlplane.metering.journal import Journal
from controlplane.metering.record import Closing, Opening, Outcome

log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 1.0
_BILLED = (Outcome.COMPLETED, Outcome.CLIENT_CLOSED, Outcome.TIMED_OUT)


class Meter:
    """`tokens` is the live count; `has_prefill` is set when the replica began to answer."""

    def __init__(self, journal: Journal, opening: Opening, started: float, *, bills_parts: bool = True) -> None:
        self._journal = journal
        self._opening = opening
        self._started = started
        self._bills_parts = bills_parts
        self._progress_at = started
        self._reported = 0
        self.tokens = Tokens()
        self.has_prefill = False
        self.first_token_at: float | None = None
        self.served_model = opening.served_model
        self.endpoint_id, self.replica_id, self.attempts = opening.endpoint_id, opening.replica_id, 1
        self.closing: Closing | None = None

    def begin(self, attempts: int) -> None:
        """A new attempt: what an earlier one said of tokens does not count (reference: losers of retries are not billed)."""
        self.attempts = attempts
        self.tokens = Tokens()
        self.has_prefill, self.first_token_at = False, None

    def progress(self, now: float) -> None:
        """Write down where the stream stands, once a second while tokens flow."""
        if now - self._progress_at < _PROGRESS_SECONDS or self.tokens.completion == self._reported:
            return
        self._progress_at, self._reported = now, self.tokens.completion
        try:
            self._journal.progress(self._opening, prompt_tokens=self._prompt(), completion_tokens=self._reported)
        except OSError:
            log.exception("cannot write progress to the usage journal")

    def _prompt(self) -> int:
        return self._opening.prompt_estimate if self.tokens.prompt is None else self.tokens.prompt

    def close(self, outcome: Outcome, status: int) -> None:
        """Write the end, once: the first call decides. Raises OSError when the journal cannot be written."""
        if self.closing is not None:
            return
        tokens = self.tokens
        has_used = (
            outcome is Outcome.COMPLETED or tokens.completion > 0 or (self.has_prefill and outcome is not Outcome.REFUSED)
        )
        self.closing = Closing(
            ended_at=max(time.time_ns() // 1000, self._opening.started_at),
            outcome=outcome,
            status=status,
            endpoint_id=self.endpoint_id,
            replica_id=self.replica_id,
            prompt_tokens=self._prompt() if has_used else 0,
            completion_tokens=tokens.completion,
            cached_tokens=tokens.cached,
            is_estimated=has_used and not tokens.is_exact,
            is_billable=has_used and outcome in (_BILLED if self._bills_parts else (Outcome.COMPLETED,)),
            attempts=self.attempts,
            served_model=self.served_model,
            first_token_ms=None if self.first_token_at is None else round(1000 * (self.first_token_at - self._started)),
        )
        self._journal.close(self._opening, self.closing)
