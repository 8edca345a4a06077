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
from tests.rights import ASKED_BY_HANDLERS, LEAST_IN_PROJECT, LEAST_OUTSIDE, SOCKETS, may

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "openapi.json"
OPERATIONS = [
    (path, operation["x-bedplate-action"])
    for path, methods in json.loads(DOCUMENT.read_text())["paths"].items()
    for operation in methods.values()
    if isinstance(operation, dict) and "x-bedplate-action" in operation
]
ACTIONS = sorted({action for _, action in OPERATIONS} | SOCKETS)
actions = st.sampled_from(ACTIONS) | st.from_regex(r"[a-z]{1,8}\.[a-z]{1,8}(-[a-z]{1,5})?", fullmatch=True)
roles = st.frozensets(st.sampled_from(["operator", "person", "viewer", "editor", "admin"]), max_size=4)


def test_the_table_knows_every_operation_and_no_other():
    inside = {action for path, action in OPERATIONS if "{project}" in path} | SOCKETS
    outside = {action for path, action in OPERATIONS if "{project}" not in path}
    words = "write it in tests/rights.py, at the least role that needs it"
    assert set(LEAST_IN_PROJECT) == inside | ASKED_BY_HANDLERS, words
    assert set(LEAST_OUTSIDE) == outside, words


@pytest.mark.parametrize(
    "held", [frozenset(), *(frozenset({role}) for role in ("person", "viewer", "editor", "admin", "operator"))]
)
def test_the_policies_say_of_every_action_what_the_table_says(held):
    for action in ACTIONS:
        for in_project in (False, True):
            is_permitted = policy.permits(held, action, in_project=in_project, in_scope=True)
            assert is_permitted == may(held, action, in_project=in_project, in_scope=True), action


@given(roles, actions, st.booleans(), st.booleans())
def test_the_policies_say_what_the_table_says(held, action, in_project, in_scope):
    given_ = policy.permits(held, action, in_project=in_project, in_scope=in_scope)
    assert given_ == may(held, action, in_project=in_project, in_scope=in_scope)


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
