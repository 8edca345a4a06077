"""A supervisor that starts nothing: units are entries of a dictionary, and a test lets them die."""

from __future__ import annotations

from hostagent.drivers.fault import Faults
from hostagent.drivers.supervisor.protocol import SupervisorTraits, UnitObserved, UnitRendered, UnitWanted
from hostagent.lib.process import Incarnation


class FakeSupervisor:
    traits = SupervisorTraits(name="fake")

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.units: dict[str, UnitObserved] = {}
        self.wanted: dict[str, UnitWanted] = {}
        self._starts = 0

    def render(self, wanted: UnitWanted) -> UnitRendered:
        return UnitRendered(argv=wanted.argv)

    async def observe(self, name: str) -> UnitObserved | None:
        await self.faults.reach("supervisor.observe", name)
        return self.units.get(name)

    async def apply(self, wanted: UnitWanted) -> UnitObserved:
        await self.faults.reach("supervisor.apply", wanted.name)
        found = self.units.get(wanted.name)
        if found is not None and found.state == "running":
            return found
        self._starts += 1
        incarnation = Incarnation(pid=0, start_ticks=self._starts, boot_id="fake")
        self.wanted[wanted.name] = wanted
        self.units[wanted.name] = UnitObserved(name=wanted.name, state="running", incarnation=incarnation)
        return self.units[wanted.name]

    async def remove(self, name: str) -> None:
        await self.faults.reach("supervisor.remove", name)
        self.units.pop(name, None)
        self.wanted.pop(name, None)

    async def names(self) -> tuple[str, ...]:
        return tuple(self.units)

    def die(self, name: str, *, exit_code: int | None = None, exit_signal: int | None = 9) -> None:
        """The process of `name` ends, as a crash (a signal) or by itself (an exit code)."""
        self.units[name] = UnitObserved(
            name=name,
            state="exited",
            incarnation=None,
            exit_code=exit_code,
            exit_signal=exit_signal if exit_code is None else None,
        )

    def reboot(self) -> None:
        """Nothing of the last boot runs or is remembered."""
        self.units.clear()
        self.wanted.clear()
