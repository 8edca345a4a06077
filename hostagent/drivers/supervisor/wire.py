"""Units as JSON: how the plain supervisor is told of them, remembers them and finds those it starts at boot.

The one rule: the same keys in all three places, so a file in `units.d` is what a client would send, plus `restart`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hostagent.drivers.supervisor.protocol import UnitLimits, UnitObserved, UnitWanted
from hostagent.lib.process import Incarnation


def unit_to_json(wanted: UnitWanted) -> dict[str, Any]:
    plain = dataclasses.asdict(wanted)
    plain["directory"], plain["log_path"] = str(wanted.directory), str(wanted.log_path)
    return plain


def unit_from_json(plain: dict[str, Any]) -> UnitWanted:
    """Raises TypeError or ValueError for what is not a unit."""
    fields = dict(plain)
    limits = dict(fields.pop("limits", {}))
    limits["cpus"] = tuple(limits.get("cpus", ()))
    for name in ("directory", "log_path"):
        if name in fields:
            fields[name] = Path(fields[name])
    fields["argv"] = tuple(fields["argv"])
    fields["groups"] = tuple(fields.get("groups", ()))
    if not fields["argv"] or not str(fields["argv"][0]).startswith("/"):
        raise ValueError("argv must start with an absolute path")
    return UnitWanted(**fields, limits=UnitLimits(**limits))


def observed_to_json(observed: UnitObserved) -> dict[str, Any]:
    return dataclasses.asdict(observed)


def observed_from_json(plain: dict[str, Any]) -> UnitObserved:
    fields = dict(plain)
    incarnation = fields.pop("incarnation")
    return UnitObserved(**fields, incarnation=Incarnation(**incarnation) if incarnation else None)
