"""The harness lets a careful program through and catches each kind of carelessness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest

from controlplane import kernel
from controlplane.kernel.harness import Fault, Harness, HarnessFailed, Scenario
from controlplane.kernel.program import Memo, Outcome, Program, Terminal, done, goto, step, wait
from controlplane.kernel.registry import Registry
from controlplane.kernel.world import World

SOON = timedelta(minutes=5)


@dataclass
class Shelf:
    """The outside: a box may stand on it once, by id; a second `put` of the same id is fine, of another one is a leak."""

    boxes: dict[str, list[str]] = field(default_factory=dict)
    polls: dict[str, int] = field(default_factory=dict)

    def put(self, owner: str, box: str) -> None:
        boxes = self.boxes.setdefault(owner, [])
        if box not in boxes:
            boxes.append(box)

    def is_dry(self, owner: str) -> bool:
        self.polls[owner] = self.polls.get(owner, 0) + 1
        return self.polls[owner] > 3

    def remove(self, owner: str) -> None:
        self.boxes.pop(owner, None)


class BoxMemo(Memo):
    box: str = ""


class LidProgram(Program[str, Shelf]):
    @step(within=SOON)
    async def put(self) -> Outcome:
        self.world.hosts.put(self.subject, "lid")
        return goto(self.lie)

    @step(within=None)
    async def lie(self) -> Outcome:
        return wait()

    @step(within=SOON)
    async def destroy(self) -> Outcome:
        self.world.hosts.remove(self.subject)
        return done()


class BoxProgram(Program[str, Shelf]):
    """Names its box in a transaction before making it; has a lid as child."""

    memo: BoxMemo

    @step(within=SOON)
    async def choose(self) -> Outcome:
        async with self.raw_tx() as tx:
            self.memo.box = f"box-{self.run_id}"
            self.spawn(LidProgram, f"{self.subject}-lid")
            return tx.goto(self.put)

    @step(within=SOON)
    async def put(self) -> Outcome:
        self.world.hosts.put(self.subject, self.memo.box)
        return goto(self.dry)

    @step(within=SOON)
    async def dry(self) -> Outcome:
        if not self.world.hosts.is_dry(self.subject) or not await self.children_ready():
            return wait(seconds=30)
        return goto(self.stand)

    @step(within=None)
    async def stand(self) -> Outcome:
        return wait()

    @step(within=SOON)
    async def destroy(self) -> Outcome:
        self.world.hosts.remove(self.subject)
        if not await self.children_gone():
            self.destroy_child(LidProgram, f"{self.subject}-lid")
            return wait()
        return done()


class ForgetfulProgram(BoxProgram):
    """Chooses a new name at each try."""

    tries = 0

    @step(within=SOON)
    async def put(self) -> Outcome:
        type(self).tries += 1
        self.world.hosts.put(self.subject, f"box-{type(self).tries}")
        if len(self.world.hosts.boxes[self.subject]) > 1:
            raise Terminal("box.doubled", "two boxes stand there")
        return goto(self.dry)


class MessyProgram(BoxProgram):
    """Leaves the box standing."""

    @step(within=SOON)
    async def destroy(self) -> Outcome:
        if self.has_signal("never") or await self.children_gone():
            return done()
        self.destroy_child(LidProgram, f"{self.subject}-lid")
        return wait()


class StuckProgram(BoxProgram):
    @step(within=SOON)
    async def dry(self) -> Outcome:
        raise OSError("it rains")


def scenario(program: type[Program[Any, Any]]) -> Scenario:
    async def make(world: World[Any], number: int) -> str:
        subject = f"{program.name}{number}"
        async with world.database.session() as session:
            await kernel.start(session, program.name, subject)
        return subject

    async def leftovers(world: World[Any], subject: str) -> Sequence[str]:
        boxes = [box for owner in (subject, f"{subject}-lid") for box in world.hosts.boxes.get(owner, [])]
        running = await world.database.pool.fetch("SELECT program FROM run WHERE finished_at IS NULL")
        return boxes + [row[0] for row in running]

    return Scenario(registry=Registry([LidProgram, program]), program=program.name, make=make, leftovers=leftovers)


@pytest.fixture
def shelved(world: World[None]) -> World[Shelf]:
    return replace(world, hosts=Shelf())


async def test_a_careful_program_passes(shelved: World[Shelf]) -> None:
    assert await Harness(shelved, scenario(BoxProgram)).run() > 20
    assert shelved.hosts.boxes == {}
    tries = "SELECT count(*) FROM run WHERE finished_at IS NULL OR lease IS NOT NULL"
    assert await shelved.database.pool.fetchval(tries) == 0


@pytest.mark.parametrize(
    ("program", "words"),
    [(ForgetfulProgram, "two boxes stand there"), (MessyProgram, "left over: box-"), (StuckProgram, "it rains")],
)
async def test_a_careless_program_is_caught(shelved: World[Shelf], program: type[BoxProgram], words: str) -> None:
    with pytest.raises(HarnessFailed, match=words):
        await Harness(shelved, scenario(program)).run()


@pytest.mark.parametrize("fault", [Fault.CRASH, Fault.STOLEN])
async def test_every_step_runs_twice(shelved: World[Shelf], fault: Fault) -> None:
    plain = await Harness(shelved, scenario(BoxProgram)).life()
    twice = await Harness(shelved, numbered(scenario(BoxProgram), 100)).life(fault=fault)
    assert twice >= plain + 4, "a try more for each step but the lid's rest; drying takes fewer polls the second time"


def numbered(scenario: Scenario, offset: int) -> Scenario:
    async def make(world: World[Any], number: int) -> str:
        return await scenario.make(world, number + offset)

    return replace(scenario, make=make)
