"""How a class becomes a program: its name, steps, memo and model; and what is refused at once."""

from __future__ import annotations

from datetime import timedelta

import pytest

from controlplane.kernel.memo import Memo, MemoUnreadable, NoMemo
from controlplane.kernel.outcome import Done, Goto, Wait
from controlplane.kernel.program import Outcome, Program, done, goto, step, wait
from controlplane.kernel.reconcile import Reconciler
from controlplane.kernel.registry import Registry
from controlplane.kernel.service import shard_of
from controlplane.models.incident import Incident

SOON = timedelta(minutes=5)


class ShipMemo(Memo):
    version = 2
    port: str = ""

    @classmethod
    def upgrade(cls, version, data):
        if version != 1:
            return super().upgrade(version, data)
        return {"port": data["harbour"]}


class BigShipProgram(Program[Incident]):
    memo: ShipMemo

    @step(within=SOON)
    async def load(self) -> Outcome:
        return goto(self.sail)

    @step(within=None)
    async def sail(self) -> Outcome:
        return wait()

    @step(within=timedelta(minutes=1))
    async def destroy(self) -> Outcome:
        return done()

    async def helper(self) -> Outcome:
        return goto(self.helper)


class TideReconciler(Reconciler[str]):
    async def reconcile(self) -> None: ...


def test_a_program_knows_itself() -> None:
    assert BigShipProgram.name == "big_ship"
    assert list(BigShipProgram.steps) == ["load", "sail", "destroy"]
    assert BigShipProgram.first_step == "load"
    assert BigShipProgram.model is Incident
    assert BigShipProgram.memo_type is ShipMemo
    assert TideReconciler.name == "tide"
    assert TideReconciler.model is None
    assert TideReconciler.memo_type is NoMemo
    assert Registry([BigShipProgram]).seconds == {"big_ship": {"start": 300, "load": 300, "sail": None, "destroy": 60}}


def test_outcomes() -> None:
    program = object.__new__(BigShipProgram)
    assert goto(program.sail) == Goto("sail")
    assert wait(timedelta(minutes=1)) == Wait(60)
    assert wait(seconds=2) == Wait(2)
    assert wait() == Wait(None)
    assert done({"n": 1}) == Done({"n": 1})
    with pytest.raises(TypeError, match="not a step"):
        goto(program.helper)


def test_memo_round_trip_and_upgrade() -> None:
    memo = ShipMemo(port="Kiel")
    assert ShipMemo.load(memo.dump()) == memo
    assert ShipMemo.load("{}") == ShipMemo()
    assert ShipMemo.load('{"memo_version": 1, "harbour": "Kiel"}') == memo
    with pytest.raises(MemoUnreadable):
        ShipMemo.load('{"memo_version": 3, "port": "Kiel"}')
    with pytest.raises(ValueError, match="forbidden"):
        ShipMemo.load('{"memo_version": 2, "prot": "Kiel"}')


def test_what_the_registry_refuses() -> None:
    class NoEndProgram(Program[str]):
        name = "no_end"

        @step(within=SOON)
        async def go(self) -> Outcome:
            return done()

        async def destroy(self) -> Outcome:
            return done()

    class OtherProgram(BigShipProgram):
        name = "big_ship"

    with pytest.raises(TypeError, match="destroy is not a step"):
        Registry([NoEndProgram])
    with pytest.raises(TypeError, match="two programs"):
        Registry([BigShipProgram, OtherProgram])
    assert Registry([Reconciler]).programs == {}


def test_shards_are_stable_and_spread() -> None:
    assert shard_of("host_01m8psk48ve70tdw90gbcqn1pa") == 40
    found = {shard_of(f"run_{number}") for number in range(2000)}
    assert found == set(range(64))


def test_the_real_programs_register() -> None:
    assert all(program.steps for program in Registry.discover().programs.values())
