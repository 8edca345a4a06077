"""The OpenAPI document: committed, complete, and every operation walked as every role."""

from __future__ import annotations

import json
import re

import pytest

from controlplane.api import reference
from controlplane.authz import policy
from controlplane.core.ids import Kind, new_id

REFRESH = "run: python -m controlplane.api.reference --write"
METHODS = {"get", "post", "put", "patch", "delete"}
ACTION = "x-bedplate-action"
SSO = {"session.methods", "session.start-sso", "session.finish-sso"}


@pytest.fixture(scope="module")
def document():
    return json.loads(reference.openapi())


def operations(document):
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if method in METHODS:
                yield method, path, operation


@pytest.mark.parametrize(("name", "text"), [("openapi.json", reference.openapi), ("errors.md", reference.errors)])
def test_committed_pages_are_fresh(name, text):
    assert (reference.DIRECTORY / name).read_text() == text(), REFRESH


def test_every_operation_names_its_action_and_errors(document):
    seen = set()
    for method, path, operation in operations(document):
        where = f"{method} {path}"
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*\.[a-z]+(-[a-z]+)*", operation.get(ACTION, "")), where
        assert re.fullmatch(r"[a-z]+(_[a-z]+)+", operation["operationId"]), where
        assert operation["operationId"] not in seen, where
        seen.add(operation["operationId"])
        assert operation.get("description"), where
        assert {"401", "403", "404", "422", "500", "503"} <= set(operation["responses"]), where
        for status, answer in operation["responses"].items():
            if status >= "400":
                name = answer.get("$ref", "").rpartition("/")[2]
                shown = document["components"]["responses"][name] if name else answer
                assert list(shown["content"]) == ["application/problem+json"], where
                assert "`" in shown["description"], where
        for parameter in operation["parameters"]:
            assert parameter.get("description"), f"{where}: {parameter['name']}"
            has_example = "example" in parameter or "examples" in parameter or "examples" in parameter["schema"]
            assert has_example or "examples" in json.dumps(parameter["schema"]), f"{where}: {parameter['name']}"


def test_every_field_has_description_and_example(document):
    for name, schema in document["components"]["schemas"].items():
        for field, body in schema.get("properties", {}).items():
            assert body.get("description"), f"{name}.{field} has no description"
            assert "examples" in body or "example" in body, f"{name}.{field} has no example"


def _path(template: str, project: str) -> str:
    """The template with the project, and a plausible id for everything else."""
    kinds = {kind.name.lower(): kind for kind in Kind}

    def value(match: re.Match[str]) -> str:
        name = match[1]
        return project if name == "project" else new_id(kinds.get(name, Kind.VM))

    return re.sub(r"\{(\w+)\}", value, template)


async def _status(client, method: str, path: str) -> tuple[int, str]:
    """Status and code. The event stream is asked with a bad position, which is looked at after the authorisation."""
    params = {"after": "x"} if path.endswith("/events") else None
    body = {} if method in {"post", "put", "patch"} else None
    answer = await client.request(method.upper(), path, json=body, params=params)
    code = answer.json().get("code", "") if answer.headers.get("content-type", "").endswith("json") and answer.content else ""
    return answer.status_code, code


def _is_public(operation) -> bool:
    return operation.get("x-bedplate-public", False)


def test_only_signing_in_is_public(document):
    public = {operation[ACTION] for _, _, operation in operations(document) if _is_public(operation)}
    assert public == {"session.create", "session.redeem", "login.create", "login.poll", *SSO}


async def test_walk_every_operation_as_everybody_but_the_operator(document, anonymous, stranger, viewer, member):
    """Anonymous is refused everywhere; a stranger finds nothing of ours; nobody gets past project and role."""
    for method, template, operation in operations(document):
        if _is_public(operation):
            continue
        path, where = _path(template, "ours"), f"{method} {template}"
        action = operation[ACTION]
        is_in_project = "{project}" in template
        assert await _status(anonymous, method, path) == (401, "auth.token_missing"), where

        status, code = await _status(stranger, method, path)
        if is_in_project:
            assert (status, code) == (404, "project.not_found"), where
        as_member, member_code = await _status(member, method, path)
        as_viewer, viewer_code = await _status(viewer, method, path)
        if not is_in_project:
            assert (status, code) == (as_member, member_code) == (as_viewer, viewer_code), where
            assert as_member in {200, 403, 404, 422}, where
            assert method == "get" or as_member in {403, 404}, f"{where}: a member may write outside of its project"
        elif policy.group(action, in_project=True) in {"govern", "operate"}:
            assert as_member == as_viewer == 403, where
        else:
            assert as_member not in {401, 403, 500}, where
            assert member_code != "project.not_found", where
            is_read = policy.group(action, in_project=True) == "read"
            assert (as_viewer == 403) != is_read, f"{where}: a viewer gets {as_viewer} {viewer_code}"
            assert is_read <= (method == "get"), f"{where}: a viewer may change something"


async def test_walk_every_operation_as_operator(document, operator):
    for method, template, operation in operations(document):
        if operation[ACTION] != "project.delete" and not _is_public(operation):
            as_operator, code = await _status(operator, method, _path(template, "ours"))
            assert as_operator not in {401, 403, 500}, f"{method} {template}: {as_operator} {code}"
