"""The outside world of a program: everything that is not the program's own row, given to it by whoever runs it.

The one rule: the kernel does not know what a host is. `World` is generic in the type of `hosts`; programs that speak to
hosts say `Program[Vm, HostLinks]` and get `self.world.hosts` typed, and the worker (or a test) fills it in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from typing_extensions import TypeVar

from controlplane.core.clock import Clock
from controlplane.core.sealing import Sealer
from controlplane.kernel.database import Database
from controlplane.settings import Settings

Hosts = TypeVar("Hosts", default=Any)


@dataclass(frozen=True, slots=True, kw_only=True)
class World(Generic[Hosts]):
    """What programs may touch. Tests hand in fakes."""

    database: Database
    hosts: Hosts
    clock: Clock
    settings: Settings
    sealer: Sealer
