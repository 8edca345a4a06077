"""The life of a replica: its machine is made, its model answers, gateways send to it, it drains and goes."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import delete, exists, func, select

from controlplane.events.service import emit
from controlplane.kernel.memo import Memo
from controlplane.kernel.program import Outcome, Program, done, goto, step, wait
from controlplane.kernel.tx import Tx
from controlplane.models.endpoint_revision import EndpointRevision
from controlplane.models.gateway import GatewayPresence
from controlplane.models.nic import Nic
from controlplane.models.replica import Replica
from controlplane.models.replica_use import ReplicaUse
from controlplane.models.vm import Vm
from controlplane.remote.link import HostKeyChanged, HostLinks
from controlplane.resources.key.publish import publish
from controlplane.resources.loadbalancer import service as loadbalancers
from controlplane.resources.replica.probe import HostUnreachable, NotServed, probe
from controlplane.resources.vm.program import VmProgram

SHORT_SECONDS = 0.2
SOON_SECONDS = 1
LOOK_SECONDS = 10
LIVES_SECONDS = 15
"""A gateway that has said nothing for so long is none; one that only seems so is kept from strangers by resting addresses."""


class ReplicaMemo(Memo):
    """`withdrawn`: the version of the routes that leaves this replica out; 0 = no gateway was ever told of it."""

    withdrawn: int = 0


class ReplicaProgram(Program[Replica, HostLinks]):
    """Owns one replica and, as a child, the machine that is its body."""

    memo: ReplicaMemo  # pyright: ignore[reportIncompatibleVariableOverride] - the kernel makes one of the annotated class

    @step(within=timedelta(minutes=5))
    async def start(self) -> Outcome:
        """Have the machine made; its own program knows how."""
        vm = await self._machine()
        if vm is not None:
            self.spawn(VmProgram, vm.id, host_id=vm.host_id)
        return goto(self.boot)

    @step(within=timedelta(hours=2))
    async def boot(self) -> Outcome:
        """Wait until engine and weights lie on the host and the machine runs."""
        if not await self.children_ready():
            return wait()
        return goto(self.load)

    @step(within=timedelta(minutes=30))
    async def load(self) -> Outcome:
        """Wait until the replica itself says that it serves the model; then gateways may send to it."""
        failure = await self._failure()
        if failure is not None:
            await self._note(failure)
            return wait(seconds=SOON_SECONDS)
        async with self.tx() as tx:
            await self._ready(tx)
            return tx.goto(self.serve)

    @step(within=None)
    async def serve(self) -> Outcome:
        """At rest: look whether it still serves; gateways send to it only while it does."""
        if self.subject.state == "deleting":
            return wait()
        try:
            failure = await self._failure()
        except (HostUnreachable, HostKeyChanged):
            return wait(seconds=LOOK_SECONDS)  # the host's own state tells; gateways see for themselves
        if (failure is None) == (self.subject.state == "ready"):
            return wait(seconds=LOOK_SECONDS)
        async with self.tx() as tx:
            await self._ready(tx) if failure is None else await self._unhealthy(tx, failure)
            return tx.wait(seconds=SOON_SECONDS)

    @step(within=timedelta(minutes=30))
    async def destroy(self) -> Outcome:
        """Leave the sight of gateways, let open answers end, then remove the machine, then the row."""
        if not self.has_subject:
            return done()
        if self.subject.deleting_at is None or self.subject.base_url is not None:
            await self._withdraw()
            return wait(seconds=SHORT_SECONDS)
        if await self._is_in_sight() or await self._is_in_use():
            return wait(seconds=SOON_SECONDS)
        async with self.tx() as tx:
            kept = select(Vm).where(Vm.id == self.subject.vm_id).with_for_update(read=True, key_share=True)
            vm = (await tx.session.scalars(kept)).one_or_none()
            if vm is not None:  # while its row is held its own run cannot end, so this makes no second one
                self.spawn(VmProgram, vm.id, host_id=vm.host_id)
                self.destroy_child(VmProgram, vm.id)
                return tx.wait(seconds=LOOK_SECONDS)
            await tx.session.execute(delete(Replica).where(Replica.id == self.subject_id))
            self.signal("endpoint", self.subject.endpoint_id, "replica")
            return tx.done()

    async def _is_in_sight(self) -> bool:
        """Whether a gateway that lives has not said yet that it goes by routes without this replica."""
        since = func.now() - timedelta(seconds=LIVES_SECONDS)
        behind = exists().where(GatewayPresence.at > since, GatewayPresence.routes < self.memo.withdrawn)
        async with self.world.database.sessionmaker() as session:
            return bool(await session.scalar(select(behind)))

    async def _is_in_use(self) -> bool:
        """Whether a gateway has an answer open there, and it may still go on. Asked when it is in no gateway's sight."""
        limit = timedelta(seconds=self.world.settings.gateway.drain_seconds)
        if self.subject.deleting_at is None or self.world.clock.now() >= self.subject.deleting_at + limit:
            return False
        used = exists().where(ReplicaUse.replica_id == self.subject_id)
        async with self.world.database.sessionmaker() as session:
            return bool(await session.scalar(select(used)))

    # -- looks --------------------------------------------------------------------------------------------------------

    async def _machine(self) -> Vm | None:
        async with self.world.database.sessionmaker() as session:
            return await session.get(Vm, self.subject.vm_id) if self.subject.vm_id else None

    async def _failure(self) -> str | None:
        """Why it does not serve, None when it does. Raises HostUnreachable."""
        async with self.world.database.sessionmaker() as session:
            made_of = await session.get_one(EndpointRevision, (self.subject.endpoint_id, self.subject.revision))
            vm = await session.get(Vm, self.subject.vm_id) if self.subject.vm_id else None
        if vm is None or vm.host_id is None or vm.workload is None:
            return "it has no machine"
        port = vm.workload["port"]
        assert isinstance(port, int)
        served = str(made_of.spec["served_model_id"])
        try:
            await probe(self.world.hosts, vm.host_id, vm.id, port=port, served_model_id=served)
        except NotServed as failure:
            return str(failure)
        return None

    # -- changes ------------------------------------------------------------------------------------------------------

    async def _locked(self, tx: Tx) -> Replica:
        query = select(Replica).where(Replica.id == self.subject_id).with_for_update(key_share=True)
        return (await tx.session.scalars(query)).one()

    async def _note(self, failure: str) -> None:
        if self.subject.failure != failure:
            async with self.tx() as tx:
                (await self._locked(tx)).failure = failure

    async def _ready(self, tx: Tx) -> None:
        replica = await self._locked(tx)
        if replica.state == "deleting":
            return
        vm = await tx.session.get_one(Vm, replica.vm_id)
        nic = (await tx.session.scalars(select(Nic).where(Nic.owner_id == vm.id).order_by(Nic.position))).first()
        assert nic is not None, "a machine has an interface"
        assert vm.workload is not None
        replica.base_url = f"http://{nic.ipv4}:{vm.workload['port']}"
        replica.state, replica.ready_at, replica.failure = "ready", func.now(), ""
        replica.observed_generation = replica.generation
        await emit(tx.session, "replica.ready", "replica", replica.id, project_id=replica.project_id)
        self.signal("endpoint", replica.endpoint_id, "replica")
        await publish(tx.session, "routes")
        await loadbalancers.endpoint_changed(tx.session, replica.endpoint_id)

    async def _unhealthy(self, tx: Tx, failure: str) -> None:
        replica = await self._locked(tx)
        if replica.state != "ready":
            return
        replica.state, replica.failure = "unhealthy", failure
        body = {"failure": failure}
        await emit(tx.session, "replica.unhealthy", "replica", replica.id, project_id=replica.project_id, body={**body})
        self.signal("endpoint", replica.endpoint_id, "replica")
        await publish(tx.session, "routes")
        await loadbalancers.endpoint_changed(tx.session, replica.endpoint_id)

    async def _withdraw(self) -> None:
        """Out of every gateway's sight."""
        async with self.tx() as tx:
            replica = await self._locked(tx)
            replica.state, replica.base_url, replica.deleting_at = "deleting", None, func.now()
            self.memo.withdrawn = await publish(tx.session, "routes")
            await loadbalancers.endpoint_changed(tx.session, replica.endpoint_id)
