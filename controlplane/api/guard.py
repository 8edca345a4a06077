"""The web process cannot reach a host: whatever could is refused at import, also when it is imported by name.

import-linter holds the same rule over the source; this holds it over what really runs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_REFUSED = re.compile(
    r"(asyncssh|pyroute2|controlplane\.(remote|watch|worker)|hostagent\.(verbs|drivers|lib|guest|probes))(\..*)?"
    r"|controlplane\.resources\.\w+\.(program|reconcile)"
)


class HostUnreachableByDesign(ImportError):
    """A web process tried to import what reaches hosts."""


class HostGuard(MetaPathFinder):
    """Stands first on `sys.meta_path`."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        del path, target
        if _REFUSED.fullmatch(fullname):
            raise HostUnreachableByDesign(f"{fullname} reaches hosts: a web process starts programs by name instead")
        return None


def install() -> None:
    """Refuse such imports from now on; raises HostUnreachableByDesign when one has happened already."""
    if any(isinstance(finder, HostGuard) for finder in sys.meta_path):
        return
    early = sorted(name for name in sys.modules if _REFUSED.fullmatch(name))
    if early:
        raise HostUnreachableByDesign(f"imported before the guard: {', '.join(early)}")
    sys.meta_path.insert(0, HostGuard())
