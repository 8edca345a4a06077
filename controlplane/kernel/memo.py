"""What a run remembers between steps: a typed, versioned document. The one rule: ids of things made outside go in here
(in a transaction) before they are made, so that a second try finds them.
"""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict

from controlplane.core import json
from controlplane.core.json import Json

_VERSION_KEY = "memo_version"


class MemoUnreadable(ValueError):
    """The stored memo is of a version that this program cannot bring up to date."""


class Memo(BaseModel):
    """Subclass it with fields that have defaults. Raise `version` with an incompatible change and write `upgrade`."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)
    version: ClassVar[int] = 1

    @classmethod
    def upgrade(cls, version: int, data: dict[str, Json]) -> dict[str, Json]:
        """The fields of an older `version` as today's; raises MemoUnreadable where that is impossible."""
        del data
        raise MemoUnreadable(f"{cls.__name__} is at version {cls.version}, the run remembers version {version}")

    @classmethod
    def load(cls, stored: str) -> Self:
        data = json.loads(stored)
        assert isinstance(data, dict)
        version = data.pop(_VERSION_KEY, cls.version)
        if version != cls.version:
            assert isinstance(version, int)
            data = cls.upgrade(version, data)
        return cls.model_validate(data)

    def dump(self) -> str:
        return json.canonical({_VERSION_KEY: self.version, **self.model_dump(mode="json")}).decode()


class NoMemo(Memo):
    """For programs that remember nothing."""
