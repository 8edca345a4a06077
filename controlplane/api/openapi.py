"""The OpenAPI document: FastAPI's, made honest. The one rule: it is stable, committed and compared by a test."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from controlplane.api.schemas import Problem

_CODE = re.compile(r"`([a-z0-9_.]+)`")
_DESCRIPTION = """The API of a Bedplate deployment.

Send `Authorization: Bearer <token>`. Every error is an `application/problem+json` with a stable `code`. Every POST takes an
`Idempotency-Key`. `ETag` is the generation of what is wanted; send it back as `If-Match` to change only what you have seen.
"""


def document(app: FastAPI) -> dict[str, Any]:
    """The document of `app`, made once."""
    if app.openapi_schema:
        return app.openapi_schema
    made = get_openapi(
        title=app.title, version=app.version, description=_DESCRIPTION, openapi_version="3.1.0", routes=app.routes
    )
    schemas = made.setdefault("components", {}).setdefault("schemas", {})
    problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= problem.pop("$defs", {})
    schemas["Problem"] = problem
    made["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    made["security"] = [{"token": []}]
    for path in made["paths"].values():
        for method, operation in path.items():
            _finish(method, operation)
    _share_answers(made)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    app.openapi_schema = made
    return made


def _share_answers(made: dict[str, Any]) -> None:
    """Error answers that several operations have in common stand once, under `components/responses`."""
    answers = [
        (operation["responses"], status, answer)
        for path in made["paths"].values()
        for operation in path.values()
        for status, answer in operation["responses"].items()
        if status >= "400"
    ]
    counts = Counter((status, answer["description"]) for _, status, answer in answers)
    shared = made["components"].setdefault("responses", {})
    for responses, status, answer in answers:
        if counts[status, answer["description"]] > 1:
            name = "-".join([status, *_CODE.findall(answer["description"])])
            shared[name] = answer
            responses[status] = {"$ref": f"#/components/responses/{name}"}


def _finish(method: str, operation: dict[str, Any]) -> None:
    """Add the headers that the frame reads."""
    parameters = operation.setdefault("parameters", [])
    if method == "post":
        parameters.append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "required": False,
                "description": "Makes a repeated request answer like the first one, for 24 hours.",
                "schema": {"type": "string", "maxLength": 255},
                "example": "5f1c9a2e-create-web-1",
            }
        )
    if "412" in operation["responses"]:
        parameters.append(
            {
                "name": "If-Match",
                "in": "header",
                "required": False,
                "description": "The ETag you have seen; another present generation answers 412.",
                "schema": {"type": "string"},
                "example": '"3"',
            }
        )
