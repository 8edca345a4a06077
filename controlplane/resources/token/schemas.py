"""Bodies of the token routes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, StringConstraints

from controlplane.api.schemas import Input, Name, View


class TokenCreate(Input):
    name: Name
    role: Literal["operator", "admin", "editor", "viewer", "member", "user"] = Field(
        default="member",
        description="`operator`: everything; `admin`, `editor`, `viewer`: one project (`member` is the old word for `editor`); "
        "`user`: what you may do yourself.",
        examples=["editor"],
    )
    scopes: list[Annotated[str, StringConstraints(pattern=r"^[a-z_*]+\.[a-z*-]+$", max_length=64)]] = Field(
        default=[],
        max_length=64,
        description="Patterns of the only actions it may do; empty: all.",
        examples=[["vm.*", "*.list"]],
    )
    project: str | None = Field(
        default=None, max_length=64, description="Name or id of the project of a project role.", examples=["default"]
    )
    expires_at: AwareDatetime | None = Field(
        default=None, description="From when on it is refused; null: never.", examples=["2027-01-01T00:00:00Z"]
    )


class TokenView(View):
    id: str = Field(description="The id.", examples=["tok_01jd2x4k3fe8v9m2q7t5w0y6za"])
    name: str = Field(description="The name.", examples=["ci"])
    role: str = Field(description="`operator`, a role in a project, or `user`.", examples=["editor"])
    user_id: str | None = Field(description="The person of a personal token.", examples=["user_01jd2x4k3fe8v9m2q7t5w0y6za"])
    maker_id: str | None = Field(
        description="The person who made it, also when they are gone.", examples=["user_01jd2x4k3fe8v9m2q7t5w0y6za"]
    )
    scopes: list[str] = Field(description="Patterns of the only actions it may do; empty: all.", examples=[["vm.*"]])
    project_id: str | None = Field(description="The project of a project role.", examples=["proj_01jd2x4k3fe8v9m2q7t5w0y6za"])
    hint: str = Field(description="The token's last four characters.", examples=["x3Zq"])
    created_at: AwareDatetime = Field(description="When it was made.", examples=["2026-11-30T12:00:00Z"])
    expires_at: AwareDatetime | None = Field(description="From when on it is refused.", examples=["2027-01-01T00:00:00Z"])
    last_used_at: AwareDatetime | None = Field(description="Last use, to the minute.", examples=["2026-11-30T12:00:00Z"])


class TokenCreated(TokenView):
    secret: str = Field(description="The bearer token, shown this once.", examples=["bpt_…"])
