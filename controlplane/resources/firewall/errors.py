"""What can go wrong with firewalls."""

from __future__ import annotations

from controlplane.core.errors import Conflict, InvalidInput, NoCapacity, NotFound


class FirewallNotFound(NotFound):
    """There is no firewall with this name or id in the project."""

    code = "firewall.not_found"
    title = "No such firewall"


class FirewallNameTaken(Conflict):
    """The project has a firewall of this name already."""

    code = "firewall.name_taken"
    title = "The name is taken"
    constraint = "firewall_project_id_name_idx"


class FirewallInUse(Conflict):
    """It is attached, or a rule of another firewall refers to it; detach it and revoke those rules first."""

    code = "firewall.in_use"
    title = "The firewall is in use"


class FirewallOwned(Conflict):
    """An endpoint or a load balancer keeps this firewall; change that instead."""

    code = "firewall.owned"
    title = "The firewall is kept by another resource"


class FirewallNetworkUnknown(InvalidInput):
    """There is no network with this name or id in the project."""

    code = "firewall.network_unknown"
    title = "No such network"


class FirewallVmUnknown(InvalidInput):
    """There is no VM with this name or id in the project."""

    code = "firewall.vm_unknown"
    title = "No such VM"


class FirewallPeerUnknown(InvalidInput):
    """A rule names a firewall that the project does not have."""

    code = "firewall.peer_unknown"
    title = "No such firewall in the rule"


class FirewallRuleDuplicate(Conflict):
    """The firewall has this very rule already, or the request names it twice."""

    code = "firewall.rule_duplicate"
    title = "The rule is there already"


class FirewallRuleContradicts(Conflict):
    """A denial of the same firewall covers all that the rule allows, so it would allow nothing: a denial always wins.

    Revoke the one or the other; an exception from a denial is written by leaving its addresses out of the denial.
    """

    code = "firewall.rule_contradicts"
    title = "The rules contradict each other"


class FirewallRuleUnknown(InvalidInput):
    """The firewall has no rule with this id."""

    code = "firewall.rule_unknown"
    title = "No such rule"


class FirewallTooManyRules(Conflict):
    """A firewall holds at most 100 rules; join prefixes in one rule, or attach a second firewall."""

    code = "firewall.too_many_rules"
    title = "The firewall is full"


class FirewallAttached(Conflict):
    """It is attached there already."""

    code = "firewall.attached"
    title = "The firewall is attached already"
    constraint = "firewall_attachment_firewall_id_network_id_vm_id_key"


class FirewallNotAttached(Conflict):
    """It is not attached there."""

    code = "firewall.not_attached"
    title = "The firewall is not attached there"


class FirewallLimitReached(NoCapacity):
    """The project has as many firewalls as the operator lets it (`BEDPLATE_LIMITS__FIREWALLS`)."""

    code = "firewall.limit_reached"
    title = "No more firewalls in this project"
