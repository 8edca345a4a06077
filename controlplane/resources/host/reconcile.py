"""Says to a host what is planned for it besides machines, plans what holds for all machines of every host, ends old looks.

The one rule: `host_documents` knows no noun: it says rows and writes down what the host answered.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from ipaddress import IPv4Network, IPv6Network
from typing import Any, ClassVar

from sqlalchemy import delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.json import Json
from controlplane.documents import service as documents
from controlplane.kernel import epoch
from controlplane.kernel import service as kernel
from controlplane.kernel.outcome import Outcome, step, wait
from controlplane.kernel.reconcile import Reconciler
from controlplane.kernel.tx import Tx
from controlplane.kernel.world import World
from controlplane.models.host import Host
from controlplane.models.host_document import HostDocument
from controlplane.models.loadbalancer import Loadbalancer
from controlplane.models.network import AddressPool
from controlplane.models.vm import Vm
from controlplane.remote.link import AgentError, HostKeyChanged, HostLinks, HostUnreachable
from controlplane.remote.refusal import carried_out
from controlplane.resources.host import bgp, queries
from controlplane.resources.host.service import PREFLIGHT_PROGRAM
from controlplane.resources.tunnel.queries import prefixes_of
from controlplane.settings import NetworkSettings
from hostagent.protocol.network import NoticesWanted, PolicyWanted
from hostagent.protocol.results import Succeeded
from hostagent.protocol.verbs import ENSURE
from hostagent.protocol.wanted import Generation

POLICY = "policy"
BATCH = 200
AT_ONCE = 16
SOON_SECONDS = 2
REFUSED_SECONDS = 15
REFRESH = timedelta(minutes=10)
_ORDER = {name.partition(".")[0]: place for place, name in enumerate(ENSURE)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What became of one document: the host's answer, or (code, sentence) of why not; None of both: it is still at it."""

    row: HostDocument
    success: Succeeded | None = None
    failure: tuple[str, str] | None = None


class HostDocumentsReconciler(Reconciler[Host, HostLinks]):
    """One run a host: says the stale documents, in the order in which they depend on each other, and all now and then."""

    name: ClassVar[str] = documents.PROGRAM

    @classmethod
    async def subjects(cls, world: World[Any]) -> Iterable[str]:
        async with world.database.session() as session:
            return list(await session.scalars(select(HostDocument.host_id).distinct()))

    async def reconcile(self) -> None:
        """Everything that stands in `look`: it also says when to look again."""

    @step(within=None)
    async def look(self) -> Outcome:
        if not self.has_subject or self.subject.state == "removing":
            return wait(self.every)
        rows, now_epoch = await self._stale()
        if not rows:
            return wait(self.every)
        found: list[Said] = []
        try:
            for kind in sorted({row.kind for row in rows}, key=lambda kind: _ORDER[kind]):
                found += await self._say([row for row in rows if row.kind == kind], now_epoch)
        except (HostUnreachable, HostKeyChanged):
            return wait(self.every)  # its return is a signal
        async with self.tx() as tx:
            for said in found:
                await _note(tx.session, said)
            await self._tell(tx, [said.row for said in found if said.success is not None])
            return tx.wait(seconds=self._delay(found))

    def _delay(self, found: Sequence[Said]) -> float:
        if len(found) == BATCH or any(said.success is None and said.failure is None for said in found):
            return SOON_SECONDS
        return REFUSED_SECONDS if any(said.failure is not None for said in found) else self.every.total_seconds()

    async def _stale(self) -> tuple[Sequence[HostDocument], int]:
        old = HostDocument.applied_at < func.now() - REFRESH
        async with self.tx() as tx:
            query = (
                select(HostDocument)
                .where(
                    HostDocument.host_id == self.subject_id, or_(HostDocument.applied_generation < HostDocument.generation, old)
                )
                .order_by(HostDocument.applied_at.is_not(None), HostDocument.kind, HostDocument.object_id)
                .limit(BATCH)
            )
            rows = list(await tx.session.scalars(query))
            return rows, await epoch.current(tx.session)

    async def _say(self, rows: Sequence[HostDocument], now_epoch: int) -> list[Said]:
        """Raises HostUnreachable and HostKeyChanged; what the host refuses is written down."""
        slots = asyncio.Semaphore(AT_ONCE)

        async def say(row: HostDocument) -> Said:
            async with slots:
                return await self._say_one(row, now_epoch)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(say(row)) for row in rows]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _say_one(self, row: HostDocument, now_epoch: int) -> Said:
        hosts = self.world.hosts
        try:
            if row.is_wanted:
                document = documents.restored(row, now_epoch)
                if isinstance(document, NoticesWanted):
                    document = documents.keyed(document, self.world.sealer)
                elif isinstance(document, PolicyWanted) and document.bgp is not None:
                    async with self.tx() as tx:  # read after the document: its passwords, or newer ones
                        host = await tx.session.get_one(Host, self.subject_id, populate_existing=True)
                    document = bgp.with_passwords(document, host, self.world.sealer)
                result = await hosts.ensure(self.subject_id, document)
            else:
                generation = Generation(epoch=now_epoch, number=row.generation)
                result = await hosts.purge(self.subject_id, row.kind, row.object_id, generation)
            return Said(row=row, success=carried_out(result))
        except AgentError as error:
            if error.code == "verb.unknown" and not row.is_wanted:
                return Said(row=row, success=Succeeded())  # an agent that does not know the kind has none of it
            return Said(row=row, failure=(error.code, error.message))

    async def _tell(self, tx: Tx, rows: Sequence[HostDocument]) -> None:
        """The objects' own runs, and machines that wait for their firewalls before they boot."""
        changed = [row for row in rows if row.applied_generation < row.generation]
        for kind, object_id in sorted({(row.kind, row.object_id) for row in changed}):
            await kernel.signal(tx.session, kind, object_id, "host", {"host_id": self.subject_id})
        if any(row.kind == "edgeways" for row in changed):  # backends that are reached by them may see clients now
            for loadbalancer_id in await tx.session.scalars(select(Loadbalancer.id).order_by(Loadbalancer.id)):
                await kernel.signal(tx.session, "loadbalancer", loadbalancer_id, "host", {"host_id": self.subject_id})
        if any(row.kind in {"policy", "firewall"} for row in changed):
            waiting = select(Vm.id).where(Vm.host_id == self.subject_id, Vm.state == "placed", Vm.observed_generation == 0)
            for vm_id in await tx.session.scalars(waiting.order_by(Vm.id)):
                await kernel.signal(tx.session, "vm", vm_id, "documents")


async def _note(session: AsyncSession, said: Said) -> None:
    """Only for the generation that was said: a newer plan stays stale."""
    row = said.row
    here = (
        HostDocument.host_id == row.host_id,
        HostDocument.kind == row.kind,
        HostDocument.object_id == row.object_id,
        HostDocument.generation >= row.generation,
    )
    change = update(HostDocument).where(*here).execution_options(synchronize_session=False)
    if said.failure is not None:
        code, detail = said.failure
        await session.execute(change.where(HostDocument.generation == row.generation).values(failure=code, detail=detail))
    elif said.success is not None:
        observed: dict[str, Json] = {**said.success.observed}
        values = {"applied_generation": row.generation, "applied_at": func.now(), "observed": observed}
        await session.execute(change.values(**values))
        same = HostDocument.generation == row.generation
        await session.execute(change.where(same).values(failure="", detail=""))
        gone = delete(HostDocument).where(*here, same, HostDocument.is_final)
        await session.execute(gone.execution_options(synchronize_session=False))


class PolicyReconciler(Reconciler[str, HostLinks]):
    """Plans what holds for every machine: where it may never go, and which addresses leave masqueraded."""

    name: ClassVar[str] = "policy"

    async def reconcile(self) -> None:
        async with self.tx() as tx:
            await plan_policy(tx.session, self.world.settings.network)


async def plan_policy(session: AsyncSession, settings: NetworkSettings, *, only: str = "") -> None:
    """For every host that carries machines or balances, or for one of them."""
    pool = await session.scalar(select(AddressPool))
    own = prefixes_of(pool) if pool is not None else ()
    infrastructure = infrastructure_cidrs(list(await session.scalars(select(Host))), settings, own)
    private = (str(pool.ipv4_cidr), str(pool.ipv6_cidr)) if pool is not None else ()
    wanted = PolicyWanted(
        id=POLICY,
        generation=documents.UNPLANNED,
        infrastructure_cidrs=infrastructure,
        private_cidrs=tuple(sorted(private)),
        is_enforced=True,
    )
    query = select(Host).where(Host.state == "ready", Host.roles.overlap(["compute", "edge"])).order_by(Host.id)
    for host in await session.scalars(query.where(Host.id == only) if only else query):
        await documents.plan(session, host.id, POLICY, replace(wanted, bgp=bgp.planned(host)))


def infrastructure_cidrs(
    hosts: Iterable[Host], settings: NetworkSettings, own: Iterable[IPv4Network | IPv6Network] = ()
) -> tuple[str, ...]:
    """The hosts' own addresses, also the private ones (`own`), and what the operator named, without overlaps, sorted."""
    ipv4, ipv6 = [], []
    named = [ipaddress.ip_network(cidr) for cidr in settings.infrastructure_cidrs]
    for network in [*named, *own, *(found for host in hosts for found in _addresses(host))]:
        (ipv4 if isinstance(network, IPv4Network) else ipv6).append(network)
    merged = [*ipaddress.collapse_addresses(ipv4), *ipaddress.collapse_addresses(ipv6)]
    return tuple(sorted(str(network) for network in merged))


def _addresses(host: Host) -> Iterable[IPv4Network | IPv6Network]:
    """A name is not looked up: the data address is known by number. Loopback is no address to deny."""
    for text in {host.address, str(host.data_ipv4 or ""), str(host.data_ipv6 or "")}:
        try:
            found = ipaddress.ip_address(text)
        except ValueError:
            continue
        if not found.is_loopback:
            yield ipaddress.ip_network(found)


class HostPreflightsReconciler(Reconciler[str, HostLinks]):
    """Ends preflights that failed and rest, when they are a day old; their incidents close with them."""

    name: ClassVar[str] = "host_preflights"
    every: ClassVar[timedelta] = timedelta(minutes=10)

    async def reconcile(self) -> None:
        async with self.tx() as tx:
            for preflight_id in await queries.old_preflights(tx.session):
                await kernel.destroy(tx.session, PREFLIGHT_PROGRAM, preflight_id)
