"""The wanted documents of this host and the tombstones of purged ones, in memory and on disk.

The one rule: what is on disk is the truth; memory changes after the file did. Documents of machines are sealed as a whole,
because a seed and an engine's environment carry secrets; so are those with keys and passwords of hosts and routers.
"""

from __future__ import annotations

import base64
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostagent.lib import files
from hostagent.lib.paths import Paths
from hostagent.lib.seal import HostSealer, SealBroken
from hostagent.protocol import codec
from hostagent.protocol.errors import AgentError
from hostagent.protocol.verbs import ENSURE, KIND_NAMES
from hostagent.protocol.wanted import Generation

TOMBSTONE_SECONDS = 30 * 86_400
SEALED_KINDS = frozenset({"vm", "notices", "policy"})
_VERSION = 1
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """`at`: wall-clock seconds, only used to forget it after 30 days."""

    generation: Generation
    at: float


def check_id(object_id: str) -> str:
    """The id; raises AgentError `request.invalid` for anything that could be another path."""
    if not _ID.fullmatch(object_id):
        raise AgentError("request.invalid", f"{object_id[:80]!r} is not an id", retryable=False)
    return object_id


class Documents:
    """`broken`: documents that cannot be read or opened, by key, with the reason; they stay on disk and are reported."""

    def __init__(self, paths: Paths, sealer: HostSealer) -> None:
        self._paths = paths
        self._sealer = sealer
        self._documents: dict[Key, Any] = {}
        self._tombstones: dict[Key, Tombstone] = {}
        self.broken: dict[Key, str] = {}
        self._newest_epoch = 0

    async def load(self) -> None:
        """Read everything; once, at start."""
        files.drop_partials(self._paths.state)
        for kind in KIND_NAMES:
            files.drop_partials(self._paths.wanted / kind)
            files.drop_partials(self._paths.tombstones / kind)
            for path in _entries(self._paths.wanted / kind):
                await self._load_document(kind, path)
            for path in _entries(self._paths.tombstones / kind):
                self._load_tombstone(kind, path)

    def get(self, kind: str, object_id: str) -> Any | None:
        return self._documents.get((kind, object_id))

    def all(self, kind: str) -> tuple[Any, ...]:
        return tuple(document for (found, _), document in self._documents.items() if found == kind)

    def ordered(self) -> tuple[Key, ...]:
        """Every object that has a document, in the order in which kinds depend on each other."""
        return tuple(sorted(self._documents, key=lambda key: (KIND_NAMES.index(key[0]), key[1])))

    async def put(self, kind: str, document: Any) -> None:
        """On disk and known afterwards. Raises AgentError `disk.full`."""
        body = codec.encode(document)
        content: dict[str, Any] = {"version": _VERSION, "id": document.id, "generation": body["generation"]}
        if kind in SEALED_KINDS:
            sealed = await self._sealer.seal(json.dumps(body).encode(), context=_context(kind, document.id))
            content["sealed"] = base64.b64encode(sealed).decode()
        else:
            content["body"] = body
        files.write_atomically(self._path(kind, document.id), json.dumps(content).encode())
        self._documents[kind, document.id] = document
        self._heard(document.generation)
        self.broken.pop((kind, document.id), None)

    def drop(self, kind: str, object_id: str) -> None:
        files.remove(self._path(kind, object_id))
        self._documents.pop((kind, object_id), None)
        self.broken.pop((kind, object_id), None)

    def newest_epoch(self) -> int:
        """The highest epoch that this host was told anything under; 0: nothing yet."""
        return self._newest_epoch

    def _heard(self, generation: Generation) -> None:
        self._newest_epoch = max(self._newest_epoch, generation.epoch)

    def tombstone(self, kind: str, object_id: str) -> Generation | None:
        found = self._tombstones.get((kind, object_id))
        return found.generation if found else None

    def is_purged(self, kind: str, object_id: str) -> bool:
        """Whether its document, if any, is at most as young as its tombstone: it must go."""
        grave, document = self.tombstone(kind, object_id), self.get(kind, object_id)
        return grave is not None and (document is None or document.generation <= grave)

    def entomb(self, kind: str, object_id: str, generation: Generation) -> None:
        """Refuse this generation and older ones for 30 days from now. Keeps the higher of two generations."""
        found = self.tombstone(kind, object_id)
        stone = Tombstone(generation=max(generation, found) if found else generation, at=time.time())
        files.write_atomically(self._paths.tombstones / kind / f"{object_id}.json", json.dumps(codec.encode(stone)).encode())
        self._tombstones[kind, object_id] = stone
        self._heard(stone.generation)

    def forget_old_tombstones(self, now: float) -> None:
        for (kind, object_id), stone in list(self._tombstones.items()):
            if now - stone.at > TOMBSTONE_SECONDS and (kind, object_id) not in self._documents:
                files.remove(self._paths.tombstones / kind / f"{object_id}.json")
                del self._tombstones[kind, object_id]

    async def _load_document(self, kind: str, path: Path) -> None:
        try:
            body = await self._open(kind, path.stem, _read(path))
            document: Any = codec.decode(ENSURE[f"{kind}.ensure"], body)
        except (OSError, ValueError, KeyError, TypeError, SealBroken, AgentError) as error:
            self.broken[kind, path.stem] = str(error)
            return
        self._documents[kind, path.stem] = document
        self._heard(document.generation)

    async def _open(self, kind: str, object_id: str, content: dict[str, Any]) -> Any:
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']} is unknown to this agent")
        if "sealed" not in content:
            return content["body"]
        sealed = base64.b64decode(content["sealed"])
        return json.loads(await self._sealer.open(sealed, context=_context(kind, object_id)))

    def _load_tombstone(self, kind: str, path: Path) -> None:
        try:
            stone = codec.decode(Tombstone, _read(path))
            self._tombstones[kind, path.stem] = stone
            self._heard(stone.generation)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.broken[kind, path.stem] = f"tombstone: {error}"

    def _path(self, kind: str, object_id: str) -> Path:
        return self._paths.wanted / kind / f"{object_id}.json"


def _entries(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.json")) if directory.is_dir() else []


def _read(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise TypeError("not an object")
    return content


def _context(kind: str, object_id: str) -> str:
    return f"wanted.{kind}:{object_id}"
