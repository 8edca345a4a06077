"""Changes of firewalls. The one rule: whatever changes what a firewall means on hosts starts its run.

A firewall means something else when its rules change, when its members do, and when those of a firewall do that it refers to.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import delete, exists, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.errors import FieldError, InvalidInput
from controlplane.core.ids import Kind, is_id, new_id
from controlplane.documents import service as documents
from controlplane.kernel import service as kernel
from controlplane.models.firewall import Firewall, FirewallAttachment, FirewallRule
from controlplane.models.network import Network
from controlplane.models.project import Project
from controlplane.models.vm import Vm
from controlplane.resources.firewall.errors import (
    FirewallAttached,
    FirewallInUse,
    FirewallLimitReached,
    FirewallNetworkUnknown,
    FirewallNotAttached,
    FirewallOwned,
    FirewallPeerUnknown,
    FirewallRuleContradicts,
    FirewallRuleDuplicate,
    FirewallRuleUnknown,
    FirewallTooManyRules,
    FirewallVmUnknown,
)
from controlplane.resources.firewall.rule import idle_allowance, key_of, match_of
from controlplane.resources.firewall.schemas import MAX_RULES, FirewallCreate, FirewallUpdate, Rule, RuleInput, Target
from controlplane.settings import LimitSettings

PROGRAM = "firewall"
DEFAULT = "default"
HOST_ROLES = {"gateways": "gateway", "edges": "edge"}  # far ends that name hosts of the operator
ANYWHERE = ("0.0.0.0/0", "::/0")


async def create(session: AsyncSession, limits: LimitSettings, project_id: str, wanted: FirewallCreate) -> Firewall:
    """Raises the errors of this noun; nothing is kept then."""
    await _check_limit(session, limits, project_id)
    firewall = Firewall(
        id=new_id(Kind.FIREWALL),
        project_id=project_id,
        name=wanted.name,
        description=wanted.description,
        labels=dict(wanted.labels),
    )
    session.add(firewall)
    await session.flush()
    await _put_rules(session, firewall, wanted.rules)
    for place, ref in enumerate(wanted.networks):
        network_id = await network_id_of(session, project_id, ref, pointer=f"/networks/{place}")
        session.add(FirewallAttachment(firewall_id=firewall.id, network_id=network_id))
    for place, ref in enumerate(wanted.vms):
        session.add(FirewallAttachment(firewall_id=firewall.id, vm_id=await _vm_id(session, project_id, ref, f"/vms/{place}")))
    await session.flush()
    await kernel.start(session, PROGRAM, firewall.id)
    return firewall


async def update(session: AsyncSession, firewall: Firewall, changes: FirewallUpdate) -> None:
    check_owner(firewall)
    sent = changes.model_fields_set
    if "rules" in sent:
        mine = delete(FirewallRule).where(FirewallRule.firewall_id == firewall.id)
        await session.execute(mine.execution_options(synchronize_session=False))
        await _put_rules(session, firewall, changes.rules)
    if "description" in sent:
        firewall.description = changes.description
    if "labels" in sent:
        firewall.labels = dict(changes.labels)
    await _changed(session, firewall)


async def add_rule(session: AsyncSession, firewall: Firewall, wanted: RuleInput, action: str) -> None:
    """Raises FirewallRuleDuplicate, FirewallRuleContradicts, FirewallTooManyRules and the errors of what the rule refers to."""
    check_owner(firewall)
    rule = await _rule(session, firewall, wanted, action, pointer="")
    known = await rules_of(session, firewall.id)
    if any(key_of(other) == key_of(rule) for other in known):
        raise FirewallRuleDuplicate(f"{firewall.name} has this rule already")
    opposite = next((other for other in known if match_of(other) == match_of(rule)), None)
    if (over := opposite or idle_allowance(rule, known)) is not None:
        words = (
            f"rule {over.id} of {firewall.name} {'allows' if over.action == 'allow' else 'denies'} the same: revoke it first"
        )
        raise FirewallRuleContradicts(words, rule=over.id)
    if len(known) >= MAX_RULES:
        raise FirewallTooManyRules(f"{firewall.name} has {len(known)} rules", rules=len(known))
    rule.position = known[-1].position + 1 if known else 0
    session.add(rule)
    await _changed(session, firewall)


async def revoke(session: AsyncSession, firewall: Firewall, rule_id: str) -> None:
    """Raises FirewallRuleUnknown. Flows that only this rule let in end on the hosts."""
    check_owner(firewall)
    rule = await session.scalar(select(FirewallRule).where(FirewallRule.id == rule_id, FirewallRule.firewall_id == firewall.id))
    if rule is None:
        detail = f"{firewall.name} has no rule {rule_id}"
        raise FirewallRuleUnknown(detail, errors=(FieldError(pointer="/rule", detail=detail),))
    await session.delete(rule)
    await _changed(session, firewall)


async def attach(session: AsyncSession, firewall: Firewall, target: Target) -> None:
    """Raises FirewallAttached, FirewallNetworkUnknown, FirewallVmUnknown."""
    check_owner(firewall)
    network_id, vm_id = await _target(session, firewall, target)
    if await _attachment(session, firewall.id, network_id, vm_id) is not None:
        raise FirewallAttached(f"{firewall.name} is attached to {target.network or target.vm} already")
    session.add(FirewallAttachment(firewall_id=firewall.id, network_id=network_id, vm_id=vm_id))
    await _changed(session, firewall)
    await wake(session, await referring(session, [firewall.id]))


async def detach(session: AsyncSession, firewall: Firewall, target: Target) -> None:
    """Raises FirewallNotAttached, FirewallNetworkUnknown, FirewallVmUnknown."""
    check_owner(firewall)
    attachment = await _attachment(session, firewall.id, *await _target(session, firewall, target))
    if attachment is None:
        raise FirewallNotAttached(f"{firewall.name} is not attached to {target.network or target.vm}")
    await session.delete(attachment)
    await _changed(session, firewall)
    await wake(session, await referring(session, [firewall.id]))


async def remove(session: AsyncSession, firewall: Firewall) -> None:
    """Delete the row; raises FirewallInUse while it is attached: to detach may open or close, so it is said explicitly."""
    check_owner(firewall)
    if await session.scalar(select(exists().where(FirewallAttachment.firewall_id == firewall.id))):
        raise FirewallInUse(f"{firewall.name} is attached: detach it first")
    if others := await referring(session, [firewall.id]):
        names = await session.scalars(select(Firewall.name).where(Firewall.id.in_(others)).order_by(Firewall.name))
        raise FirewallInUse(f"rules of {', '.join(names)} refer to {firewall.name}")
    await _drop(session, firewall)


# -- firewalls that something else keeps ------------------------------------------------------------------------------


async def keep_owned(
    session: AsyncSession, *, owner_id: str, project_id: str, name: str, rules: Sequence[FirewallRule], vm_ids: Collection[str]
) -> None:
    """Make the firewall of an endpoint or load balancer equal to this: its rules, and the machines it applies to."""
    firewall = await _owned(session, owner_id, project_id, name)
    known = await rules_of(session, firewall.id)
    mine = select(FirewallAttachment).where(FirewallAttachment.firewall_id == firewall.id)
    attached = {item.vm_id: item for item in await session.scalars(mine)}
    wanted = {key_of(rule) for rule in rules}
    if {key_of(rule) for rule in known} == wanted and set(attached) == set(vm_ids):
        return
    for rule in known:
        if key_of(rule) not in wanted:
            await session.delete(rule)
    for rule in rules:
        if key_of(rule) not in {key_of(other) for other in known}:
            rule.id, rule.firewall_id = new_id(Kind.FIREWALL_RULE), firewall.id
            session.add(rule)
    for vm_id, item in attached.items():
        if vm_id not in vm_ids:
            await session.delete(item)
    for vm_id in sorted(set(vm_ids) - set(attached)):
        session.add(FirewallAttachment(firewall_id=firewall.id, vm_id=vm_id))
    await _changed(session, firewall)


async def open_owned(
    session: AsyncSession, *, owner_id: str, project_id: str, name: str, rule: FirewallRule, vm_id: str
) -> None:
    """Let the owner's firewall apply to one more machine, with this rule; the firewall is made with its first one."""
    firewall = await _owned(session, owner_id, project_id, name)
    if key_of(rule) not in {key_of(known) for known in await rules_of(session, firewall.id)}:
        rule.id, rule.firewall_id = new_id(Kind.FIREWALL_RULE), firewall.id
        session.add(rule)
    if await _attachment(session, firewall.id, None, vm_id) is None:
        session.add(FirewallAttachment(firewall_id=firewall.id, vm_id=vm_id))
    await _changed(session, firewall)


async def drop_owned(session: AsyncSession, owner_id: str) -> None:
    """Absent is success."""
    firewall = await session.scalar(select(Firewall).where(Firewall.owner_id == owner_id).with_for_update())
    if firewall is not None:
        await session.execute(delete(FirewallAttachment).where(FirewallAttachment.firewall_id == firewall.id))
        await _drop(session, firewall)


async def ensure_default(session: AsyncSession, project_id: str) -> Firewall:
    """The project's firewall `default`, made when there is none: SSH and ICMP from anywhere, everything among its members."""
    await session.scalar(select(Project.id).where(Project.id == project_id).with_for_update(key_share=True))
    query = select(Firewall).where(Firewall.project_id == project_id, Firewall.name == DEFAULT, Firewall.owner_id.is_(None))
    firewall = await session.scalar(query)
    if firewall is not None:
        return firewall
    firewall = Firewall(
        id=new_id(Kind.FIREWALL), project_id=project_id, name=DEFAULT, description="Made with the project's first network."
    )
    session.add(firewall)
    await session.flush()
    anywhere = {"direction": "ingress", "action": "allow", "far_end": "cidrs", "cidrs": list(ANYWHERE)}
    among = {"direction": "ingress", "action": "allow", "protocol": "any", "far_end": "firewall", "peer_id": firewall.id}
    ssh, icmp = {**anywhere, "protocol": "tcp", "port_first": 22, "port_last": 22}, {**anywhere, "protocol": "icmp"}
    for place, values in enumerate((ssh, icmp, among)):
        session.add(FirewallRule(id=new_id(Kind.FIREWALL_RULE), firewall_id=firewall.id, position=place, **values))
    await session.flush()
    return firewall


# -- who must look ----------------------------------------------------------------------------------------------------


async def wake(session: AsyncSession, firewall_ids: Collection[str]) -> None:
    for firewall_id in sorted(set(firewall_ids)):
        await kernel.start(session, PROGRAM, firewall_id)


async def members_changed(session: AsyncSession, network_ids: Collection[str], vm_id: str) -> Sequence[str]:
    """Wake the firewalls of a machine's interfaces, and those that refer to one of these; returns the former."""
    mine = await firewalls_of(session, network_ids, vm_id)
    await wake(session, [*mine, *await referring(session, mine)])
    return mine


async def firewalls_of(session: AsyncSession, network_ids: Collection[str], vm_id: str) -> Sequence[str]:
    """The firewalls that apply to a machine with interfaces in these networks, sorted."""
    here = or_(FirewallAttachment.network_id.in_(list(network_ids)), FirewallAttachment.vm_id == vm_id)
    return sorted(await session.scalars(select(FirewallAttachment.firewall_id).where(here).distinct()))


async def referring(session: AsyncSession, firewall_ids: Collection[str]) -> Sequence[str]:
    """Other firewalls with rules whose far end is one of these."""
    if not firewall_ids:
        return ()
    query = select(FirewallRule.firewall_id).where(FirewallRule.peer_id.in_(list(firewall_ids))).distinct()
    return sorted(set(await session.scalars(query)) - set(firewall_ids))


async def wake_role(session: AsyncSession, far_end: str) -> None:
    """The gateways or edges of the deployment changed: wake the firewalls that name them."""
    await wake(session, list(await session.scalars(select(FirewallRule.firewall_id).where(FirewallRule.far_end == far_end))))


# -- parts ------------------------------------------------------------------------------------------------------------


async def rules_of(session: AsyncSession, firewall_id: str) -> Sequence[FirewallRule]:
    query = select(FirewallRule).where(FirewallRule.firewall_id == firewall_id).order_by(FirewallRule.position, FirewallRule.id)
    return list(await session.scalars(query))


def check_owner(firewall: Firewall) -> None:
    if firewall.owner_id is not None:
        raise FirewallOwned(f"{firewall.name} is kept by {firewall.owner_id}")


async def _owned(session: AsyncSession, owner_id: str, project_id: str, name: str) -> Firewall:
    query = select(Firewall).where(Firewall.owner_id == owner_id).with_for_update(key_share=True)
    firewall = await session.scalar(query)
    if firewall is None:
        firewall = Firewall(id=new_id(Kind.FIREWALL), project_id=project_id, owner_id=owner_id, name=name)
        session.add(firewall)
        await session.flush()
    return firewall


async def _changed(session: AsyncSession, firewall: Firewall) -> None:
    firewall.generation += 1
    await session.flush()
    await kernel.start(session, PROGRAM, firewall.id)


async def _drop(session: AsyncSession, firewall: Firewall) -> None:
    await documents.withdraw(session, "firewall", firewall.id, is_final=True)
    await kernel.destroy(session, PROGRAM, firewall.id)
    mine = delete(FirewallRule).where(FirewallRule.firewall_id == firewall.id)
    await session.execute(mine.execution_options(synchronize_session=False))
    await session.execute(delete(Firewall).where(Firewall.id == firewall.id).execution_options(synchronize_session=False))
    session.expunge(firewall)


async def _check_limit(session: AsyncSession, limits: LimitSettings, project_id: str) -> None:
    """Under the project's lock, so that two requests at once do not both get the last one."""
    await session.scalar(select(Project.id).where(Project.id == project_id).with_for_update(key_share=True))
    query = select(func.count()).select_from(Firewall)
    have = await session.scalar(query.where(Firewall.project_id == project_id, Firewall.owner_id.is_(None))) or 0
    if have >= limits.firewalls:
        raise FirewallLimitReached(f"the project has {have} firewalls, and may have {limits.firewalls}", limit=limits.firewalls)


async def _put_rules(session: AsyncSession, firewall: Firewall, wanted: Sequence[Rule]) -> None:
    seen: dict[tuple[object, ...], int] = {}
    rules: list[FirewallRule] = []
    for place, rule in enumerate(wanted):
        made = await _rule(session, firewall, rule, rule.action, pointer=f"/rules/{place}")
        if (before := seen.setdefault(key_of(made), place)) != place:
            detail = f"it is the same as rule {before}"
            raise FirewallRuleDuplicate(detail, errors=(FieldError(pointer=f"/rules/{place}", detail=detail),))
        made.position = place
        rules.append(made)
    for place, rule in enumerate(rules):
        if (over := idle_allowance(rule, rules)) is not None:
            detail = f"rule {rules.index(over)} denies all that it allows, and a denial wins"
            raise FirewallRuleContradicts(detail, errors=(FieldError(pointer=f"/rules/{place}", detail=detail),))
    session.add_all(rules)
    await session.flush()


async def _rule(session: AsyncSession, firewall: Firewall, wanted: RuleInput, action: str, *, pointer: str) -> FirewallRule:
    first, last = wanted.ports
    rule = FirewallRule(
        id=new_id(Kind.FIREWALL_RULE),
        firewall_id=firewall.id,
        direction=wanted.direction,
        action=action,
        protocol=wanted.protocol,
        port_first=first,
        port_last=last,
        far_end="cidrs",
        cidrs=list(wanted.cidrs or ()),
    )
    if wanted.network is not None:
        rule.far_end = "network"
        rule.network_id = await network_id_of(session, firewall.project_id, wanted.network, pointer=f"{pointer}/network")
    elif wanted.firewall is not None:
        rule.far_end = "firewall"
        rule.peer_id = await _peer_id(session, firewall, wanted.firewall, f"{pointer}/firewall")
    return rule


async def network_id_of(session: AsyncSession, project_id: str, ref: str, *, pointer: str) -> str:
    """Raises FirewallNetworkUnknown."""
    column = Network.id if is_id(ref, Kind.NETWORK) else Network.name
    query = select(Network.id).where(column == ref, Network.project_id == project_id).with_for_update(key_share=True, read=True)
    found = await session.scalar(query)
    if found is None:
        raise FirewallNetworkUnknown(f"no network {ref}", errors=(FieldError(pointer=pointer, detail=f"no network {ref}"),))
    return found


async def _vm_id(session: AsyncSession, project_id: str, ref: str, pointer: str) -> str:
    column = Vm.id if is_id(ref, Kind.VM) else Vm.name
    query = select(Vm.id).where(column == ref, Vm.project_id == project_id, Vm.owner_id.is_(None), Vm.state != "deleting")
    found = await session.scalar(query)
    if found is None:
        raise FirewallVmUnknown(f"no VM {ref}", errors=(FieldError(pointer=pointer, detail=f"no VM {ref}"),))
    return found


async def _peer_id(session: AsyncSession, firewall: Firewall, ref: str, pointer: str) -> str:
    if ref in {firewall.id, firewall.name}:
        return firewall.id
    column = Firewall.id if is_id(ref, Kind.FIREWALL) else Firewall.name
    query = select(Firewall.id).where(column == ref, Firewall.project_id == firewall.project_id, Firewall.owner_id.is_(None))
    found = await session.scalar(query.with_for_update(key_share=True, read=True))
    if found is None:
        detail = f"no firewall {ref}"
        raise FirewallPeerUnknown(detail, errors=(FieldError(pointer=pointer, detail=detail),))
    return found


async def _target(session: AsyncSession, firewall: Firewall, target: Target) -> tuple[str | None, str | None]:
    if target.network is not None:
        return await network_id_of(session, firewall.project_id, target.network, pointer="/network"), None
    if target.vm is None:
        raise InvalidInput("name a network or a vm")
    return None, await _vm_id(session, firewall.project_id, target.vm, "/vm")


async def _attachment(
    session: AsyncSession, firewall_id: str, network_id: str | None, vm_id: str | None
) -> FirewallAttachment | None:
    query = select(FirewallAttachment).where(
        FirewallAttachment.firewall_id == firewall_id,
        FirewallAttachment.network_id.is_not_distinct_from(network_id),
        FirewallAttachment.vm_id.is_not_distinct_from(vm_id),
    )
    return await session.scalar(query)
