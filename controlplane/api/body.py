"""The body of a request, read once. The one rule: what two parsers would read differently is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import Request

from controlplane.api.errors import MalformedJson


class StrictRequest(Request):
    """A request whose JSON names every field of an object once (RFC 8259, section 4: else anything may come of it)."""

    async def json(self) -> Any:
        """Raises json.JSONDecodeError and MalformedJson."""
        if not hasattr(self, "_json"):
            self._json = json.loads(await self.body(), object_pairs_hook=_object)
        return self._json


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise MalformedJson(f"the field {twice[:100]!r} stands twice in one object")
    return found
