"""Who may do what, written by hand: the table that the policies and every operation of the API are held against.

The one rule: nothing here is taken from the code. A new action is written here by somebody who has thought about who needs it;
until then the tests fail.
"""

from __future__ import annotations

IN_PROJECT: dict[str, str] = {
    # who looks
    "viewer": """
        address.list address.show audit.list endpoint.decisions endpoint.list endpoint.revisions endpoint.show
        firewall.list firewall.show key.list key.show loadbalancer.list loadbalancer.show member.list member.show
        network.list network.show project.show route.list route.show snapshot.list snapshot.show usage.export
        usage.list usage.records vm.list vm.log vm.show volume.list volume.show
    """,
    # who also makes, changes and deletes, and gets into machines
    "editor": """
        address.attach address.create address.delete address.detach address.update endpoint.create endpoint.delete
        endpoint.promote endpoint.rollback endpoint.scale endpoint.update firewall.allow firewall.attach
        firewall.create firewall.delete firewall.deny firewall.detach firewall.revoke firewall.update key.create
        key.delete key.update loadbalancer.activate loadbalancer.add loadbalancer.create loadbalancer.delete
        loadbalancer.drain loadbalancer.eject loadbalancer.eject-by-alerts loadbalancer.remove-backend
        loadbalancer.update loadbalancer.update-backend network.create network.delete network.update route.create
        route.delete route.update snapshot.create snapshot.delete snapshot.update vm.connect vm.console vm.create
        vm.delete vm.resize vm.restart vm.start vm.stop vm.update volume.attach volume.create volume.delete
        volume.detach volume.grow volume.restore volume.snapshot volume.update
    """,
    # who also says who else may
    "admin": "member.create member.delete member.update project.rotate-key project.update token.create token.delete",
    "operator": "project.delete",
}
OUTSIDE: dict[str, str] = {
    # who signs in
    "anonymous": """
        login.create login.poll session.create session.finish-sso session.methods session.redeem session.start-sso
    """,
    # everybody who is known; they see what is shared, or of their projects
    "everybody": """
        event.list image.list image.show model.list model.show operation.list operation.show pool.list pool.show
        project.list token.current
    """,
    # people, each their own
    "person": """
        login.approve login.deny login.show session.delete session.delete-current session.list session.show
        token.create token.delete token.list token.show user.confirm-totp user.current user.password user.remove-totp
        user.start-totp
    """,
    "operator": """
        audit.list-all host.artifact-list host.artifact-upload host.bootstrap-key host.create host.delete host.drain
        host.inventory host.list host.preflight host.preflight-show host.reboot host.show host.undrain host.update
        image.create image.delete image.upload incident.list incident.resolve incident.show model.import
        model.validate placement.explain pool.create pool.delete pool.update price.create price.delete price.list
        price.show project.create provider.create provider.delete provider.list provider.show provider.update
        storage_pool.list storage_pool.reclaim storage_pool.show tunnel.rotate-keys tunnel.show user.create
        user.delete user.invite user.list user.show user.update
    """,
}
SOCKETS = frozenset({"vm.console", "vm.connect"})
"""WebSockets, which the OpenAPI document does not know."""

ASKED_BY_HANDLERS = frozenset({"token.create", "token.delete"})
"""Of a project that stands in the body or the row, not in the path."""

RANK = {"viewer": 1, "editor": 2, "admin": 3, "operator": 4}
_LOOKING = frozenset({"decisions", "export", "list", "log", "records", "revisions", "show"})


def _by_action(table: dict[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for role, actions in table.items():
        for action in actions.split():
            assert action not in found, f"{action} stands twice"
            found[action] = role
    return found


LEAST_IN_PROJECT = _by_action(IN_PROJECT)
LEAST_OUTSIDE = _by_action(OUTSIDE)


def may(held: frozenset[str], action: str, *, in_project: bool, in_scope: bool) -> bool:
    """The reference: whether who holds these roles may do it. An action that nobody wrote down is closed, but for looking."""
    if not in_scope:
        return False
    if "operator" in held:
        return True
    if not in_project:
        least = LEAST_OUTSIDE.get(action, "operator")
        return least == "everybody" or (least == "person" and "person" in held)
    unknown = "viewer" if action.partition(".")[2] in _LOOKING else "editor"
    least = LEAST_IN_PROJECT.get(action, unknown)
    return any(RANK.get(role, 0) >= RANK[least] for role in held)
