"""Bodies of the key routes."""

from __future__ import annotations

from typing import Annotated

from pydantic import AwareDatetime, Field, StringConstraints

from controlplane.api.schemas import Input, Labels, Name, Resource

Models = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=128)]] | None,
    Field(
        max_length=256,
        description="Public model names the key may call; null: every model of the project.",
        examples=[["smollm2"]],
    ),
]
Limit = Annotated[int | None, Field(ge=1, le=10**12)]
_REQUESTS = "Requests a minute; null: the deployment's limit."
_TOKENS = "Tokens a minute, prompt and answer together; null: the deployment's limit."
_LABELS = "Labels of the key, which rules of routes can ask for."
_EXPIRY = "From when on it is refused; null: never."


class KeyCreate(Input):
    name: Name
    models: Models = None
    requests_per_minute: Limit = Field(default=None, description=_REQUESTS, examples=[600])
    tokens_per_minute: Limit = Field(default=None, description=_TOKENS, examples=[200_000])
    expires_at: AwareDatetime | None = Field(default=None, description=_EXPIRY, examples=["2027-01-01T00:00:00Z"])
    labels: Labels = Field(default_factory=dict, description=_LABELS, examples=[{"team": "search"}])


class KeyUpdate(Input):
    """Only the fields that are sent change; in force within a second."""

    models: Models = None
    requests_per_minute: Limit = Field(default=None, description=_REQUESTS, examples=[600])
    tokens_per_minute: Limit = Field(default=None, description=_TOKENS, examples=[200_000])
    expires_at: AwareDatetime | None = Field(default=None, description=_EXPIRY, examples=["2027-01-01T00:00:00Z"])
    labels: Labels = Field(default_factory=dict, description=_LABELS, examples=[{"team": "search"}])


class KeyView(Resource):
    hint: str = Field(description="The key's last four characters.", examples=["x3Zq"])
    models: Models
    requests_per_minute: int | None = Field(description=_REQUESTS, examples=[600])
    tokens_per_minute: int | None = Field(description=_TOKENS, examples=[200_000])
    expires_at: AwareDatetime | None = Field(description=_EXPIRY, examples=["2027-01-01T00:00:00Z"])
    labels: dict[str, str] = Field(description=_LABELS, examples=[{"team": "search"}])


class KeyCreated(KeyView):
    secret: str = Field(description="The key for the gateway, shown this once.", examples=["bpk_…"])
