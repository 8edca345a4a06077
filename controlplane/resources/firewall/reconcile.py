"""Tells hosts about firewalls: to each host with members the rules, resolved to prefixes, and those members.

The one rule: a plan is made under the lock of the firewall's row, so that an older look never overwrites a newer one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import IPv4Network
from typing import Any, ClassVar, Literal, cast

from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.documents import service as documents
from controlplane.kernel.reconcile import Reconciler
from controlplane.kernel.world import World
from controlplane.models.firewall import Firewall, FirewallAttachment, FirewallRule
from controlplane.models.host import Host
from controlplane.models.network import Network
from controlplane.models.nic import Nic
from controlplane.models.tunnel import HostTunnel
from controlplane.models.vm import Vm
from controlplane.remote.link import HostLinks
from controlplane.resources.firewall.service import HOST_ROLES
from hostagent.protocol.network import FirewallMemberWanted, FirewallProtocol, FirewallRuleWanted, FirewallWanted

KIND = "firewall"
NOBODY = ("0.0.0.0/32",)  # no packet has this destination


@dataclass(frozen=True, slots=True, kw_only=True)
class FarEnds:
    """What names in rules mean now, as prefixes."""

    networks: dict[str, tuple[str, ...]]
    firewalls: dict[str, tuple[str, ...]]
    roles: dict[str, tuple[str, ...]]

    def of(self, rule: FirewallRule) -> tuple[str, ...]:
        match rule.far_end:
            case "cidrs":
                return tuple(rule.cidrs)
            case "network":
                return self.networks.get(rule.network_id or "", ())
            case "firewall":
                return self.firewalls.get(rule.peer_id or "", ())
            case _:
                return self.roles.get(rule.far_end, ())


class FirewallReconciler(Reconciler[Firewall, HostLinks]):
    """One run a firewall: plans its documents, and says when all reachable hosts have them."""

    name: ClassVar[str] = KIND
    every: ClassVar[timedelta] = timedelta(minutes=10)

    @classmethod
    async def subjects(cls, world: World[Any]) -> Iterable[str]:
        async with world.database.session() as session:
            return list(await session.scalars(select(Firewall.id)))

    async def reconcile(self) -> None:
        async with self.tx() as tx:
            firewall = await plan(tx.session, self.subject_id)
            if firewall is not None and await documents.is_carried_out(tx.session, KIND, firewall.id):
                firewall.observed_generation = firewall.generation


async def plan(session: AsyncSession, firewall_id: str) -> Firewall | None:
    """Make the documents of all hosts equal to the rows; the firewall's row, locked, or None: it is gone."""
    query = select(Firewall).where(Firewall.id == firewall_id).with_for_update(key_share=True)
    firewall = await session.scalar(query.execution_options(populate_existing=True))
    if firewall is None:
        await documents.withdraw(session, KIND, firewall_id, is_final=True)
        return None
    members: dict[str, list[Nic]] = {}
    for nic in await members_of(session, firewall.id):
        if nic.host_id is not None:
            members.setdefault(nic.host_id, []).append(nic)
    rules = await resolved_rules(session, firewall.id)
    for host_id, nics in sorted(members.items()):
        await documents.plan(session, host_id, KIND, document(firewall.id, rules, nics))
    await documents.withdraw(session, KIND, firewall.id, keep=list(members))
    return firewall


def document(firewall_id: str, rules: tuple[FirewallRuleWanted, ...], nics: Iterable[Nic]) -> FirewallWanted:
    members = (FirewallMemberWanted(nic_id=nic.id, ipv4=str(nic.ipv4), ipv6=str(nic.ipv6)) for nic in nics)
    return FirewallWanted(
        id=firewall_id,
        generation=documents.UNPLANNED,
        rules=rules,
        members=tuple(sorted(members, key=lambda member: member.nic_id)),
    )


async def members_of(session: AsyncSession, firewall_id: str) -> Sequence[Nic]:
    """Every interface of a machine that the firewall applies to, each once."""
    query = select(Nic).join(
        FirewallAttachment,
        or_(FirewallAttachment.network_id == Nic.network_id, FirewallAttachment.vm_id == Nic.owner_id),
    )
    query = query.join(Vm, Vm.id == Nic.owner_id).where(FirewallAttachment.firewall_id == firewall_id)
    found = await session.scalars(query.order_by(Nic.id))
    return list(found.unique())


async def resolved_rules(session: AsyncSession, firewall_id: str) -> tuple[FirewallRuleWanted, ...]:
    """The rules as hosts are told them; one whose far end means nobody just now is left out."""
    query = select(FirewallRule).where(FirewallRule.firewall_id == firewall_id).order_by(FirewallRule.position, FirewallRule.id)
    rules = list(await session.scalars(query.execution_options(populate_existing=True)))
    ends = FarEnds(
        networks=await _networks(session, {rule.network_id for rule in rules if rule.network_id}),
        firewalls=await _firewalls(session, {rule.peer_id for rule in rules if rule.peer_id}),
        roles={
            end: await _hosts(session, role) for end, role in HOST_ROLES.items() if any(rule.far_end == end for rule in rules)
        },
    )
    found = ((rule, ends.of(rule)) for rule in rules)
    return tuple(wanted_rule(rule, cidrs or NOBODY) for rule, cidrs in found if cidrs or _is_restricting(rule))


def _is_restricting(rule: FirewallRule) -> bool:
    """One egress allowance makes everything else denied, even when it means nobody just now."""
    return rule.direction == "egress" and rule.action == "allow"


def wanted_rule(rule: FirewallRule, cidrs: Collection[str]) -> FirewallRuleWanted:
    return FirewallRuleWanted(
        direction=cast("Literal['ingress', 'egress']", rule.direction),
        action=cast("Literal['allow', 'deny']", rule.action),
        protocol=cast("FirewallProtocol", rule.protocol),
        cidrs=merged(cidrs),
        port_first=rule.port_first,
        port_last=rule.port_last,
    )


def merged(cidrs: Iterable[str]) -> tuple[str, ...]:
    """The same addresses in as few prefixes as there can be, without overlaps, sorted."""
    networks = [ipaddress.ip_network(cidr) for cidr in cidrs]
    ipv4 = ipaddress.collapse_addresses(network for network in networks if isinstance(network, IPv4Network))
    ipv6 = ipaddress.collapse_addresses(network for network in networks if not isinstance(network, IPv4Network))
    return tuple(sorted(str(network) for network in (*ipv4, *ipv6)))


async def _networks(session: AsyncSession, network_ids: Collection[str]) -> dict[str, tuple[str, ...]]:
    query = select(Network.id, Network.ipv4_cidr, Network.ipv6_cidr).where(Network.id.in_(network_ids))
    return {row[0]: (str(row[1]), str(row[2])) for row in await session.execute(query)}


async def _firewalls(session: AsyncSession, firewall_ids: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Where one is attached to networks, their prefixes (nobody else has addresses of them), so that machines may come
    and go there without a word to hosts; else the addresses of the machines.
    """
    found: dict[str, tuple[str, ...]] = {}
    for firewall_id in firewall_ids:
        here = FirewallAttachment.firewall_id == firewall_id
        network_ids = list(await session.scalars(select(FirewallAttachment.network_id).where(here)))
        whole = await _networks(session, [network_id for network_id in network_ids if network_id])
        on_vms = select(Nic.ipv4, Nic.ipv6).join(FirewallAttachment, FirewallAttachment.vm_id == Nic.owner_id).where(here)
        single = [cidr for row in await session.execute(on_vms) for cidr in (f"{row[0]}/32", f"{row[1]}/128")]
        found[firewall_id] = (*(cidr for cidrs in whole.values() for cidr in cidrs), *single)
    return found


async def _hosts(session: AsyncSession, role: str) -> tuple[str, ...]:
    """The data addresses of hosts of a role, and those by which they speak into encrypted networks."""
    query = (
        select(Host.data_ipv4, Host.data_ipv6, HostTunnel.ipv4, HostTunnel.ipv6)
        .outerjoin(HostTunnel, HostTunnel.host_id == Host.id)
        .where(Host.state != "removing", Host.roles.contains([role]))
    )
    found: list[str] = []
    for row in await session.execute(query):
        found += [f"{address}/{address.max_prefixlen}" for address in row if address is not None]
    return tuple(found)
