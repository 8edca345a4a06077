"""Firewalls over HTTP."""

from __future__ import annotations

from controlplane.api.frame import Call, Noun, Page, PageOf, Ref
from controlplane.models.firewall import Firewall
from controlplane.resources.firewall import queries, service
from controlplane.resources.firewall.errors import (
    FirewallAttached,
    FirewallInUse,
    FirewallLimitReached,
    FirewallNameTaken,
    FirewallNetworkUnknown,
    FirewallNotAttached,
    FirewallNotFound,
    FirewallOwned,
    FirewallPeerUnknown,
    FirewallRuleContradicts,
    FirewallRuleDuplicate,
    FirewallRuleUnknown,
    FirewallTooManyRules,
    FirewallVmUnknown,
)
from controlplane.resources.firewall.queries import ShownFirewall
from controlplane.resources.firewall.schemas import FirewallCreate, FirewallUpdate, FirewallView, Revoke, RuleInput, Target

noun = Noun("firewall", "firewalls")
router = noun.router

_RULE = [FirewallNetworkUnknown, FirewallPeerUnknown, FirewallRuleContradicts, FirewallRuleDuplicate, FirewallTooManyRules]
_WRITE = [FirewallNotFound, FirewallOwned]


@noun.create(FirewallView, errors=[FirewallNameTaken, FirewallLimitReached, FirewallVmUnknown, FirewallAttached, *_RULE])
async def create(call: Call, body: FirewallCreate) -> ShownFirewall:
    """Make a firewall with its rules, and attach it. What it is attached to lets nothing else in than it allows."""
    row = await service.create(call.session, call.services.settings.limits, call.project_id, body)
    call.subject = row
    return await queries.show(call.session, row)


@noun.list(FirewallView)
async def list_(call: Call, page: Page) -> PageOf[ShownFirewall]:
    """The firewalls of the project, without those that endpoints and load balancers keep."""
    found = await call.page(Firewall, page, Firewall.owner_id.is_(None))
    return PageOf(items=await queries.shown(call.session, found.items), next_page_token=found.next_page_token)


@noun.show(FirewallView, errors=[FirewallNotFound])
async def show(call: Call, firewall: Ref) -> ShownFirewall:
    """One firewall with its rules."""
    return await queries.show(call.session, await call.load(Firewall, firewall))


@noun.update(FirewallView, errors=[*_WRITE, *_RULE])
async def update(call: Call, firewall: Ref, body: FirewallUpdate) -> ShownFirewall:
    """Change the fields that are sent; `rules` replaces all rules at once."""
    row = await call.load(Firewall, firewall)
    await service.update(call.session, row, body)
    return await queries.show(call.session, row)


@noun.action("allow", FirewallView, errors=[*_WRITE, *_RULE])
async def allow(call: Call, firewall: Ref, body: RuleInput) -> ShownFirewall:
    """Add a rule that allows."""
    row = await call.load(Firewall, firewall)
    await service.add_rule(call.session, row, body, "allow")
    return await queries.show(call.session, row)


@noun.action("deny", FirewallView, errors=[*_WRITE, *_RULE])
async def deny(call: Call, firewall: Ref, body: RuleInput) -> ShownFirewall:
    """Add a rule that denies; it wins over every allowance, also of other firewalls."""
    row = await call.load(Firewall, firewall)
    await service.add_rule(call.session, row, body, "deny")
    return await queries.show(call.session, row)


@noun.action("revoke", FirewallView, errors=[*_WRITE, FirewallRuleUnknown])
async def revoke(call: Call, firewall: Ref, body: Revoke) -> ShownFirewall:
    """Take a rule away; flows that it alone let in end."""
    row = await call.load(Firewall, firewall)
    await service.revoke(call.session, row, body.rule)
    return await queries.show(call.session, row)


@noun.action("attach", FirewallView, errors=[*_WRITE, FirewallAttached, FirewallNetworkUnknown, FirewallVmUnknown])
async def attach(call: Call, firewall: Ref, body: Target) -> ShownFirewall:
    """Let it apply to a network (every machine in it) or to a VM; what several firewalls allow adds up."""
    row = await call.load(Firewall, firewall)
    await service.attach(call.session, row, body)
    return await queries.show(call.session, row)


@noun.action("detach", FirewallView, errors=[*_WRITE, FirewallNotAttached, FirewallNetworkUnknown, FirewallVmUnknown])
async def detach(call: Call, firewall: Ref, body: Target) -> ShownFirewall:
    """Let it not apply there any more. Machines without any firewall let nothing in and everything out."""
    row = await call.load(Firewall, firewall)
    await service.detach(call.session, row, body)
    return await queries.show(call.session, row)


@noun.delete(FirewallView, errors=[FirewallInUse, FirewallOwned])
async def delete(call: Call, firewall: Ref) -> None:
    """Delete a firewall that is attached to nothing and that no other refers to."""
    await service.remove(call.session, await call.load(Firewall, firewall))
