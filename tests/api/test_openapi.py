"""The OpenAPI document: committed, complete, and every operation walked as every role."""

from __future__ import annotations

import json
import re

import pytest

from controlplane.api import reference
from controlplane.core.ids import Kind, new_id
from tests.api.test_sign_in import browser, signed_in
from tests.rights import LEAST_IN_PROJECT, LEAST_OUTSIDE, RANK

__all__ = ["browser"]

REFRESH = "run: python -m controlplane.api.reference --write"
METHODS = {"get", "post", "put", "patch", "delete"}
ACTION = "x-bedplate-action"


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
    assert public == {action for action, least in LEAST_OUTSIDE.items() if least == "anonymous"}


@pytest.fixture
async def admin(operator, api):
    """Holds a token of an admin of our project."""
    made = await operator.post("/v1/tokens", json={"name": "admin", "role": "admin", "project": "ours"})
    async with api.client(made.json()["secret"]) as client:
        yield client


@pytest.fixture
async def person(operator, browser):
    """Signed in, and in no project."""
    await signed_in(operator, browser, "ada")
    return browser


async def test_walk_every_operation_as_everybody(document, anonymous, stranger, person, viewer, member, admin, operator):
    """By the table: anonymous is refused everywhere, a stranger finds nothing of ours, nobody gets past project and role."""
    ours = {"viewer": viewer, "editor": member, "admin": admin}
    for method, template, operation in operations(document):
        action, path, where = operation[ACTION], _path(template, "ours"), f"{method} {template}"
        if _is_public(operation) or action in {"session.delete-current", "project.delete"}:
            continue
        assert await _status(anonymous, method, path) == (401, "auth.token_missing"), where
        if "{project}" in template:
            least = LEAST_IN_PROJECT[action]
            for outsider in (stranger, person):
                assert await _status(outsider, method, path) == (404, "project.not_found"), where
            tried = {role: (client, RANK[role] >= RANK[least]) for role, client in ours.items()}
        else:
            least = LEAST_OUTSIDE[action]
            tried = {role: (client, least == "everybody") for role, client in {**ours, "stranger": stranger}.items()}
            tried["person"] = (person, least in {"everybody", "person"})
        tried["operator"] = (operator, True)
        for role, (client, is_able) in tried.items():
            status, code = await _status(client, method, path)
            told = f"{where} as {role}: {status} {code}"
            if is_able:
                assert status not in {401, 403, 500} or code == "login.needs_session", told
                assert code != "project.not_found", told
            elif "{project}" in template:
                assert (status, code) == (403, "auth.forbidden"), told
            else:
                assert status in {403, 404}, told


@pytest.mark.parametrize("kind", ["deletes the project", "signs out"])
async def test_who_may_do_what_the_walk_leaves_out(kind, anonymous, stranger, person, viewer, member, admin, operator):
    if kind == "signs out":
        assert (await anonymous.delete("/v1/sessions/current")).status_code == 401
        for client in (stranger, viewer, member, admin):
            assert (await client.delete("/v1/sessions/current")).status_code == 403
        assert (await person.delete("/v1/sessions/current")).status_code == 204
        assert (await person.get("/v1/users/current")).status_code == 401
        return
    expected = {anonymous: 401, stranger: 404, person: 404, viewer: 403, member: 403, admin: 403, operator: 204}
    for client, status in expected.items():
        assert (await client.delete("/v1/projects/ours")).status_code == status
