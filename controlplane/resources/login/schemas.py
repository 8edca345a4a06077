"""Bodies of letting a program in."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, StringConstraints

from controlplane.api.schemas import Input, View
from controlplane.resources.token.schemas import TokenCreated

ClientName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._@-]{0,62}$"),
    Field(description="What the program and its machine are called; a person reads it.", examples=["bedplate on laptop"]),
]


class LoginCreate(Input):
    client_name: ClientName


class LoginView(View):
    id: str = Field(description="The id.", examples=["login_01jd2x4k3fe8v9m2q7t5w0y6za"])
    user_code: str = Field(description="What a person types on the console's page `/device`.", examples=["BDWP-HQPK"])
    client_name: str = Field(description="What the program calls itself.", examples=["bedplate on laptop"])
    client_address: str = Field(description="Where it asks from.", examples=["192.0.2.7"])
    state: Literal["pending", "approved", "denied"] = Field(description="What was answered.", examples=["pending"])
    created_at: AwareDatetime = Field(description="When it asked.", examples=["2026-12-01T12:00:00Z"])
    expires_at: AwareDatetime = Field(description="Until when it can be answered and used.", examples=["2026-12-01T12:10:00Z"])


class LoginBegun(LoginView):
    secret: str = Field(description="The program's own half, shown this once.", examples=["bpd_…"])
    page: str = Field(description="Path of the console's page, with the code.", examples=["/device?code=BDWP-HQPK"])
    interval_seconds: int = Field(description="How long to wait between two questions.", examples=[3])


class LoginPoll(Input):
    secret: str = Field(max_length=128, description="What `POST /v1/logins` answered.", examples=["bpd_…"])


class LoginPolled(View):
    state: Literal["pending", "approved"] = Field(description="Whether a person has let it in.", examples=["pending"])
    token: TokenCreated | None = Field(
        default=None, description="A personal token of that person, in one answer only.", examples=[None]
    )
