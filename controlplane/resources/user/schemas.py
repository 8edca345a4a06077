"""Bodies of the routes of people."""

from __future__ import annotations

from typing import Annotated

from pydantic import AwareDatetime, Field, StringConstraints

from controlplane.api.schemas import Input, Resource, View

UserName = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z0-9]([a-z0-9._@+-]{0,126}[a-z0-9])?$", max_length=128),
    Field(
        description="What is typed at sign-in: small letters, digits and `._@+-`, like an address.",
        examples=["ada@example.org"],
    ),
]
Password = Annotated[str, StringConstraints(max_length=256), Field(description="At least 12 characters.", examples=["…"])]
Code = Annotated[
    str, StringConstraints(pattern=r"^[0-9]{6}$"), Field(description="What the authenticator shows.", examples=["492039"])
]
DisplayName = Annotated[str, Field(max_length=128, description="What people read.", examples=["Ada Lovelace"])]
IsOperator = Annotated[bool, Field(description="May do everything in the deployment.", examples=[False])]


class UserCreate(Input):
    name: UserName
    display_name: DisplayName = ""
    is_operator: IsOperator = False


class UserUpdate(Input):
    display_name: str | None = Field(default=None, max_length=128, description="What people read.", examples=["Ada Lovelace"])
    is_operator: bool | None = Field(default=None, description="May do everything in the deployment.", examples=[False])
    is_disabled: bool | None = Field(default=None, description="Refused everywhere, sessions ended.", examples=[True])


class UserView(Resource):
    display_name: str = Field(description="What people read.", examples=["Ada Lovelace"])
    is_operator: bool = Field(description="May do everything in the deployment.", examples=[False])
    is_disabled: bool = Field(description="Refused everywhere.", examples=[False])
    has_password: bool = Field(description="Whether the one-time link was used.", examples=[True])
    sso_issuer: str | None = Field(
        default=None, description="The provider by which they sign in too.", examples=["https://id.example.org"]
    )
    has_totp: bool = Field(description="Whether sign-in asks for a one-time code.", examples=[False])
    locked_until: AwareDatetime | None = Field(
        description="Too many wrong passwords: until then none is looked at.", examples=["2026-12-01T12:00:00Z"]
    )


class Membership(View):
    project_id: str = Field(description="The project.", examples=["proj_01jd2x4k3fe8v9m2q7t5w0y6za"])
    project: str = Field(description="Its name.", examples=["default"])
    role: str = Field(description="`admin`, `editor` or `viewer`.", examples=["editor"])


class CurrentUser(UserView):
    memberships: list[Membership] = Field(description="The roles in projects.", examples=[[]])


class UserLink(UserView):
    link: str = Field(
        description="Opens the account once, shown this once: the path of the console's page; what follows `#` is the secret.",
        examples=["/welcome#bpl_…"],
    )
    link_expires_at: AwareDatetime = Field(description="When the link ends.", examples=["2026-12-02T12:00:00Z"])


class PasswordChange(Input):
    current: Password
    new: Password


class TotpStarted(View):
    secret: str = Field(description="For typing into an authenticator, shown this once.", examples=["JBSWY3DPEHPK3PXP"])
    uri: str = Field(description="For a QR code.", examples=["otpauth://totp/Bedplate:ada?secret=…&issuer=Bedplate"])


class TotpConfirm(Input):
    code: Code


class Proof(Input):
    password: Password
