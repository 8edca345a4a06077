"""Bodies of the provider routes."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, StringConstraints

from controlplane.api.schemas import Input, Name, Resource


def base(text: str) -> str:
    """Where a provider is; plain HTTP for this machine only, because the key goes there."""
    parts = urlsplit(text)
    if parts.scheme == "http" and parts.hostname not in {"127.0.0.1", "::1", "localhost"}:
        raise ValueError("the key would go over the network in the clear: use https://")
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise ValueError(f"{text!r} is no address of a provider, like https://api.example.com")
    return text.rstrip("/")


BaseUrl = Annotated[str, StringConstraints(max_length=1024), AfterValidator(base)]
Models = Annotated[
    list[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,95}$")]],
    Field(min_length=1, max_length=256, description="Its own names of models.", examples=[["claude-3-opus"]]),
]
_KIND = "The plug-in that speaks to it: `openai` (and what is compatible), `anthropic`, or one that is installed."
_URL = "Where it is, without `/v1`."
_PROJECTS = "Names or ids of the projects that may use it; null: all."


class ProviderCreate(Input):
    """Its models are called as `<name>/<model>`, and can be targets and fallbacks of routes under that name."""

    name: Name
    kind: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,31}$")] = Field(
        description=_KIND, examples=["anthropic"]
    )
    base_url: BaseUrl = Field(description=_URL, examples=["https://api.anthropic.com"])
    key: SecretStr = Field(
        min_length=1, max_length=4096, description="Its API key; kept sealed, never shown.", examples=["sk-…"]
    )
    models: Models
    projects: list[str] | None = Field(default=None, max_length=1000, description=_PROJECTS, examples=[["default"]])


class ProviderUpdate(Input):
    """Only the fields that are sent change; in force within a second."""

    base_url: BaseUrl = Field(default="", description=_URL, examples=["https://api.anthropic.com"])
    key: SecretStr | None = Field(default=None, min_length=1, max_length=4096, description="A new key.", examples=["sk-…"])
    models: Models = Field(default=[])
    projects: list[str] | None = Field(default=None, max_length=1000, description=_PROJECTS, examples=[["default"]])


class ProviderView(Resource):
    kind: str = Field(description=_KIND, examples=["anthropic"])
    base_url: str = Field(description=_URL, examples=["https://api.anthropic.com"])
    hint: str = Field(description="The key's last four characters.", examples=["x3Zq"])
    models: list[str] = Field(description="Its own names of models.", examples=[["claude-3-opus"]])
    project_ids: list[str] | None = Field(
        description="The projects that may use it; null: all.", examples=[["proj_01jd2x4k3fe8v9m2q7t5w0y6za"]]
    )
