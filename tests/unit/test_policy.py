"""The Cedar policies against a table of roles written by hand, over every action of the API and made-up ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.authz import policy
from controlplane.authz.service import Actor, Resource, Role, authorise
from controlplane.core.errors import Forbidden, NotFound

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "openapi.json"
ACTIONS = sorted(
    operation["x-bedplate-action"]
    for methods in json.loads(DOCUMENT.read_text())["paths"].values()
    for operation in methods.values()
    if isinstance(operation, dict) and "x-bedplate-action" in operation
)
RANK = {"viewer": 1, "editor": 2, "admin": 3}
NEEDS = {"read": 1, "change": 2, "govern": 3}

actions = st.sampled_from(ACTIONS) | st.from_regex(r"[a-z]{1,8}\.[a-z]{1,8}(-[a-z]{1,5})?", fullmatch=True)
roles = st.frozensets(st.sampled_from(["operator", "person", *RANK]), max_size=4)


def expected(held: frozenset[str], action: str, *, in_project: bool, in_scope: bool) -> bool:
    if not in_scope:
        return False
    if "operator" in held:
        return True
    group = policy.group(action, in_project=in_project)
    if in_project:
        rank = max((RANK[role] for role in held if role in RANK), default=0)
        return rank >= NEEDS.get(group, 99)
    return group == "shared" or (group == "own" and "person" in held)


@given(roles, actions, st.booleans(), st.booleans())
def test_the_policies_say_what_the_table_says(held, action, in_project, in_scope):
    given_ = policy.permits(held, action, in_project=in_project, in_scope=in_scope)
    assert given_ == expected(held, action, in_project=in_project, in_scope=in_scope)


@given(st.dictionaries(st.sampled_from("abc"), st.sampled_from(["admin", "editor", "viewer", "member"])), actions)
def test_other_projects_do_not_exist(held, action):
    actor = Actor(id="tok_1", name="t", roles={project: Role(role) for project, role in held.items()})
    with pytest.raises(NotFound):
        authorise(actor, action, Resource(project_id="elsewhere"))


@given(st.lists(st.sampled_from(["vm.*", "*.list", "vm.create", "key.show"]), min_size=1), actions)
def test_scopes_only_narrow(scopes, action):
    wide = Actor(id="tok_1", name="t", is_operator=True)
    narrow = Actor(id="tok_1", name="t", is_operator=True, scopes=tuple(scopes))
    authorise(wide, action, Resource(project_id="p"))
    if narrow.is_in_scope(action):
        authorise(narrow, action, Resource(project_id="p"))
    else:
        with pytest.raises(Forbidden, match="scopes"):
            authorise(narrow, action, Resource(project_id="p"))


def test_a_new_action_is_closed_until_it_is_opened():
    for role in ("viewer", "person"):
        assert not policy.permits(frozenset({role}), "volcano.erupt", in_project=True, in_scope=True)
        assert not policy.permits(frozenset({role}), "volcano.erupt", in_project=False, in_scope=True)


@pytest.mark.parametrize(
    ("action", "least"),
    [
        ("vm.list", "viewer"),
        ("vm.log", "viewer"),
        ("usage.export", "viewer"),
        ("vm.console", "editor"),
        ("vm.create", "editor"),
        ("key.create", "editor"),
        ("volume.delete", "editor"),
        ("member.create", "admin"),
        ("token.create", "admin"),
        ("project.rotate-key", "admin"),
        ("project.update", "admin"),
        ("project.delete", "operator"),
    ],
)
def test_the_least_role_in_a_project(action, least):
    order = ["viewer", "editor", "admin", "operator"]
    able = [role for role in order if policy.permits(frozenset({role}), action, in_project=True, in_scope=True)]
    assert able == order[order.index(least) :]


def test_what_is_open_outside_of_projects():
    outside = {action for action in ACTIONS if policy.permits(frozenset(), action, in_project=False, in_scope=True)}
    assert not {action for action in outside if action.partition(".")[2] not in {"list", "show", "current"}}
    assert not outside & {"host.list", "user.list", "incident.list", "provider.list", "audit.list-all"}
