"""Reconcilers: programs without a plot. Each look compares wanted with observed and makes them equal.

The one rule: a reconciler takes no input; a signal only makes it look sooner, and the clock alone suffices.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, ClassVar

from controlplane.kernel import service, sql
from controlplane.kernel.outcome import Outcome, done, step, wait
from controlplane.kernel.program import Program, Subject
from controlplane.kernel.world import Hosts, World

ALL = "all"


class Reconciler(Program[Subject, Hosts]):
    """Subclass it, name what there is to look at (`subjects`), write `reconcile`. Its name is the kind: FirewallReconciler
    is `firewall`; say `name` where a program has that name already.

    `Reconciler[str]` with no `subjects` of its own has one run, for `all`; `Reconciler[Host]` one for each id named.
    """

    every: ClassVar[timedelta] = timedelta(seconds=60)

    @classmethod
    async def subjects(cls, world: World[Any]) -> Iterable[str]:
        """The ids to look at: each gets a run, one that is not named any more is destroyed."""
        del world
        return (ALL,)

    @abstractmethod
    async def reconcile(self) -> None:
        """Look, make equal, report. May run twice; an exception means: look again, backing off."""

    @step(within=None)
    async def look(self) -> Outcome:
        await self.reconcile()
        return wait(self.every)

    @step(within=timedelta(minutes=10))
    async def destroy(self) -> Outcome:
        """Nothing is owned, so nothing is removed; override where something is."""
        return done()


async def keep_runs(world: World[Any], reconciler: type[Reconciler[Any, Any]]) -> None:
    """Make the unfinished runs of a reconciler equal to its subjects. Idempotent."""
    wanted = set(await reconciler.subjects(world))
    async with world.database.session() as session:
        found = {row[0] for row in await service.fetch(session, sql.UNFINISHED_SUBJECTS, reconciler.name)}
        for subject in sorted(wanted - found):
            await service.start(session, reconciler.name, subject)
        for subject in sorted(found - wanted):
            await service.destroy(session, reconciler.name, subject)
