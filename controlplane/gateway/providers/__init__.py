"""Plug-ins that speak to providers outside: what they are, and where they are found.

The one rule: a plug-in changes forms and holds no state; connections, keys, retries, accounts and limits are the gateway's. One
that is installed announces itself as an entry point of the group `bedplate.providers`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Protocol

from controlplane.core.json import JsonObject
from controlplane.gateway.directory import Price
from controlplane.gateway.family import Tokens

log = logging.getLogger(__name__)

GROUP = "bedplate.providers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outbound:
    """A client's request for a provider. `path` is the client's; `model` the provider's own name; `key` its secret."""

    path: str
    body: bytes
    document: JsonObject
    model: str
    key: str
    is_stream: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """What goes over the wire: `path` is added to the provider's base URL."""

    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


class Events(Protocol):
    """A stream on its way back: whole events in the client's form, tokens counted."""

    @property
    def tokens(self) -> Tokens: ...

    @property
    def is_done(self) -> bool: ...

    @property
    def has_tokens(self) -> bool: ...

    def feed(self, data: bytes) -> bytes: ...

    def rest(self) -> bytes: ...


class Answer(Protocol):
    """The way back (`from`): a whole answer, a refusal, a stream, each in the form of the client's path."""

    def whole(self, body: bytes) -> bytes: ...

    def refusal(self, body: bytes) -> bytes: ...

    def events(self) -> Events | None:
        """None: as an engine of ours sends them."""
        ...


class Plugin(Protocol):
    def to(self, asked: Outbound) -> Outgoing:
        """The provider's request. Raises Problem 400 for what it cannot do."""
        ...

    def from_(self, asked: Outbound) -> Answer: ...

    def usage(self, document: JsonObject) -> JsonObject | None:
        """Usage in OpenAI's or Anthropic's words, out of the provider's whole answer."""
        ...

    def price(self, model: str) -> Price | None:
        """What the provider itself says; the price book's word counts more."""
        ...


@cache
def plugins() -> Mapping[str, Plugin]:
    """Ours, and those that are installed; ours keep their names."""
    from controlplane.gateway.providers.anthropic import Anthropic
    from controlplane.gateway.providers.openai import OpenAi

    found: dict[str, Plugin] = {}
    for entry in entry_points(group=GROUP):
        try:
            found[entry.name] = entry.load()()
        except Exception:
            log.exception("the plug-in %s cannot be loaded", entry.name)
    return {**found, "openai": OpenAi(), "anthropic": Anthropic()}
