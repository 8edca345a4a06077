"""What a client asks: the body, or the form that lies in a file, and what the gateway understood of it."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.gateway.body import Asked
from controlplane.gateway.search import estimate_prompt
from controlplane.gateway.upload import Upload


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Either `body` or `upload`. Of what is in a form no tokens are known before the engine says them."""

    asked: Asked
    body: bytes = b""
    upload: Upload | None = None

    @property
    def prompt_estimate(self) -> int:
        return 0 if self.upload is not None else estimate_prompt(self.body)
