"""Which programs there are, by name. The one rule: only workers (and tests) build one; services say names."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Self, TypeAlias

from controlplane.core import json
from controlplane.kernel.program import DESTROY, START, Program

AnyProgram: TypeAlias = "type[Program[Any, Any]]"
_MODULES = ("program", "reconcile")


class Registry:
    def __init__(self, programs: Iterable[AnyProgram]) -> None:
        self.programs: Mapping[str, AnyProgram] = {}
        for program in programs:
            if program.__abstractmethods__:
                continue
            if DESTROY not in program.steps:
                raise TypeError(f"{program.__name__}.destroy is not a step: decorate it with @step(within=…)")
            if self.programs.setdefault(program.name, program) is not program:
                raise TypeError(f"two programs are named {program.name!r}")

    @classmethod
    def discover(cls, package: str = "controlplane.resources") -> Self:
        """Import every `<package>.<noun>.program` and `.reconcile` and collect the programs they define."""
        root = importlib.import_module(package)
        names = []
        for noun in pkgutil.iter_modules(root.__path__, f"{package}."):
            if noun.ispkg:
                found = {module.name for module in pkgutil.iter_modules(importlib.import_module(noun.name).__path__)}
                names += [f"{noun.name}.{module}" for module in _MODULES if module in found]
        for name in names:
            importlib.import_module(name)
        return cls(program for program in _subclasses(Program) if program.__module__ in names)

    def get(self, name: str) -> AnyProgram | None:
        return self.programs.get(name)

    @cached_property
    def seconds(self) -> Mapping[str, Mapping[str, float | None]]:
        """Seconds that each step may take, by program; `start` is the first step's other name."""
        table: dict[str, Mapping[str, float | None]] = {}
        for name, program in self.programs.items():
            seconds = {step: info.seconds for step, info in program.steps.items()}
            table[name] = {START: seconds[program.first_step], **seconds}
        return table

    @cached_property
    def seconds_json(self) -> str:
        return json.dumps(self.seconds).decode()


def _subclasses(cls: AnyProgram) -> Iterable[AnyProgram]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
