"""Ways between hosts: compute hosts, gateways and edges reach the VMs on other hosts by tunnels or over the data network.

The one rule: a host's documents are made anew from the rows; only changed ones get a new generation. `routes` plans for the
fleet, `host_tunnel` and `host_routes` carry out, one run a host.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, ClassVar

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.kernel import epoch
from controlplane.kernel import service as kernel
from controlplane.kernel.incident import open_incident, resolve_incident
from controlplane.kernel.reconcile import ALL, Reconciler
from controlplane.kernel.world import World
from controlplane.models.network import HostRoutes
from controlplane.models.tunnel import HostTunnel, TunnelRotation
from controlplane.remote.link import AgentError, HostKeyChanged, HostLinks, HostUnreachable
from controlplane.remote.refusal import carried_out
from controlplane.resources.firewall import service as firewalls
from controlplane.resources.firewall.service import HOST_ROLES
from controlplane.resources.network.mesh import TUNNEL, Mesh
from controlplane.resources.network.queries import load_mesh
from controlplane.resources.tunnel import service
from controlplane.resources.tunnel.queries import untold_hosts
from hostagent.protocol.results import Succeeded
from hostagent.protocol.wanted import Generation

SLOTS = ("a", "b")
ROTATION_LATE = "tunnel.rotation_late"
LATE = timedelta(hours=1)


class RoutesReconciler(Reconciler[str, HostLinks]):
    """Plans: gives every host whose tunnels or routes changed a new generation, and wakes its run. Ends rotations of keys."""

    name: ClassVar[str] = "routes"

    async def reconcile(self) -> None:
        async with self.tx() as tx:
            settings = self.world.settings.network
            if await service.join_hosts(tx.session):
                for far_end in HOST_ROLES:  # what they may reach, they now reach from here too
                    await firewalls.wake_role(tx.session, far_end)
            await service.rotate_when_due(tx.session, settings, self.world.clock.now())
            mesh = await load_mesh(tx.session, settings)
            digests = {host_id: member.digest() for host_id, member in mesh.members.items()}
            for host_id, member in sorted(mesh.members.items()):
                if member.own and await _plan_tunnel(tx.session, host_id, mesh.tunnel_digest(host_id, digests)):
                    await kernel.start(tx.session, "host_tunnel", host_id, host_id=host_id)
                if await _plan_routes(tx.session, host_id, mesh.routes_digest(host_id, digests)):
                    await kernel.start(tx.session, "host_routes", host_id, host_id=host_id)
            if mesh.rotation.is_rotating and await self._has_rotated(tx.session, mesh):
                await kernel.start(tx.session, self.name, ALL)

    async def _has_rotated(self, session: AsyncSession, mesh: Mesh) -> bool:
        """Every pair sends by the new keys, and every host has taken that: the old ones may go. Else an incident, when late."""
        row = await session.get_one(TunnelRotation, 1)
        unmoved = mesh.unmoved()
        if not unmoved and not await untold_hosts(session, list(mesh.members)):
            row.key_generation += 1
            row.is_rotating, row.finished_at = False, self.world.clock.now()
            await session.flush()
            await resolve_incident(session, ROTATION_LATE, TUNNEL)
            return True
        assert row.started_at is not None
        if self.world.clock.now() - row.started_at > LATE:
            pairs = ", ".join(f"{one} and {other}" for one, other in unmoved[:10]) or "routes that hosts have not taken"
            words = f"New tunnel keys are not in use everywhere yet, so the old ones stay: {pairs}"
            await open_incident(session, ROTATION_LATE, TUNNEL, words)
        return False


async def _plan_tunnel(session: AsyncSession, host_id: str, digest: str) -> bool:
    """Write the digest down; True when it is another than before. The row is there since the host joined."""
    changed = (
        update(HostTunnel)
        .where(HostTunnel.host_id == host_id, HostTunnel.digest != digest)
        .values(digest=digest, generation=HostTunnel.generation + 1)
        .returning(HostTunnel.host_id)
    )
    return await session.scalar(changed) is not None


async def _plan_routes(session: AsyncSession, host_id: str, digest: str) -> bool:
    changed = (
        insert(HostRoutes)
        .values(host_id=host_id, digest=digest)
        .on_conflict_do_update(
            index_elements=[HostRoutes.host_id],
            set_={"digest": digest, "generation": HostRoutes.generation + 1},
            where=HostRoutes.digest != digest,
        )
        .returning(HostRoutes.host_id)
    )
    return await session.scalar(changed) is not None


class HostTunnelReconciler(Reconciler[HostTunnel, HostLinks]):
    """Says all tunnels to one host, and learns from its answer: public keys, and which peers it hears."""

    name: ClassVar[str] = "host_tunnel"

    @classmethod
    async def subjects(cls, world: World[Any]) -> Iterable[str]:
        async with world.database.session() as session:
            return list(await session.scalars(select(HostTunnel.host_id).where(HostTunnel.digest != "")))

    async def reconcile(self) -> None:
        if not self.has_subject or not self.subject.digest:
            return
        async with self.tx() as tx:
            row = await tx.session.get_one(HostTunnel, self.subject_id)
            mesh = await load_mesh(tx.session, self.world.settings.network)
            member = mesh.members.get(row.host_id)
            if member is None:
                return
            digests = {host_id: other.digest() for host_id, other in mesh.members.items()}
            if mesh.tunnel_digest(row.host_id, digests) != row.digest:
                await kernel.start(tx.session, "routes", ALL)
                return
            generation = Generation(epoch=await epoch.current(tx.session), number=row.generation)
        said = await _say(self, mesh.tunnel(self.subject_id, generation))
        if said is not None:
            await self._learn(said, generation.number)

    async def _learn(self, said: Succeeded, generation: int) -> None:
        observed = said.observed
        async with self.tx() as tx:
            row = await tx.session.get_one(HostTunnel, self.subject_id, with_for_update=True)
            before = _known(row)
            row.applied_generation, row.applied_at = max(row.applied_generation, generation), func.now()
            for slot in SLOTS:
                key = str(observed.get(f"public_key_{slot}", ""))
                setattr(row, f"public_key_{slot}", key)
                setattr(row, f"key_generation_{slot}", int(observed.get(f"key_generation_{slot}", 0)) if key else 0)
                heard = str(observed.get(f"heard_{slot}", ""))
                setattr(row, f"heard_{slot}", sorted(filter(None, heard.split(","))))
            if _known(row) != before:
                await kernel.start(tx.session, "routes", ALL)


def _known(row: HostTunnel) -> tuple[object, ...]:
    return (
        row.public_key_a,
        row.key_generation_a,
        [*row.heard_a],
        row.public_key_b,
        row.key_generation_b,
        [*row.heard_b],
    )


class HostRoutesReconciler(Reconciler[HostRoutes, HostLinks]):
    """Says the whole document to one host, which compares it with what it sees; an unreachable host gets it when it is back."""

    name: ClassVar[str] = "host_routes"

    @classmethod
    async def subjects(cls, world: World[Any]) -> Iterable[str]:
        async with world.database.session() as session:
            return list(await session.scalars(select(HostRoutes.host_id)))

    async def reconcile(self) -> None:
        if not self.has_subject:
            return
        async with self.tx() as tx:
            row = await tx.session.get_one(HostRoutes, self.subject_id)
            mesh = await load_mesh(tx.session, self.world.settings.network)
            if row.host_id not in mesh.members:
                return
            digests = {host_id: other.digest() for host_id, other in mesh.members.items()}
            if mesh.routes_digest(row.host_id, digests) != row.digest:  # the rows moved on: planned anew, which wakes us
                await kernel.start(tx.session, "routes", ALL)
                return
            generation = Generation(epoch=await epoch.current(tx.session), number=row.generation)
        if await _say(self, mesh.routes(self.subject_id, generation)) is None:
            return
        async with self.tx() as tx:
            await tx.session.execute(
                update(HostRoutes)
                .where(HostRoutes.host_id == self.subject_id, HostRoutes.generation >= generation.number)
                .values(applied_generation=generation.number, applied_at=func.now())
            )
            if mesh.rotation.is_rotating:
                await kernel.start(tx.session, "routes", ALL)


async def _say(run: Reconciler[Any, HostLinks], document: Any) -> Succeeded | None:
    """The host's answer; None while it cannot be asked. Raises what it answered otherwise: the run is tried again."""
    try:
        result = carried_out(await run.world.hosts.ensure(run.subject_id, document))
    except (HostUnreachable, HostKeyChanged):
        return None
    except AgentError as error:
        if error.code == "verb.unknown":  # an agent older than tunnels: its host has no tunnel driver either
            return None
        raise
    if result is None:
        raise TimeoutError("the host is still at it")
    return result
