"""Bodies of signing in."""

from __future__ import annotations

from pydantic import AwareDatetime, Field

from controlplane.api.schemas import Input, View
from controlplane.resources.user.schemas import Code, Password, UserView


class SignIn(Input):
    name: str = Field(max_length=128, description="The person's name.", examples=["ada@example.org"])
    password: Password
    code: Code | None = Field(
        default=None, description="What the authenticator shows, where there is one.", examples=["492039"]
    )


class Redeem(Input):
    link: str = Field(max_length=128, description="What follows `#` in the one-time link.", examples=["bpl_…"])
    password: Password


class SsoMethod(View):
    name: str = Field(description="What the button says.", examples=["Example ID"])
    path: str = Field(description="Where the browser goes.", examples=["/v1/sessions/sso/start"])


class Methods(View):
    sso: SsoMethod | None = Field(description="The identity provider, where one is set up.", examples=[None])


class SessionView(View):
    id: str = Field(description="The id.", examples=["sess_01jd2x4k3fe8v9m2q7t5w0y6za"])
    user_id: str = Field(description="Whose it is.", examples=["user_01jd2x4k3fe8v9m2q7t5w0y6za"])
    user_agent: str = Field(description="What the browser calls itself.", examples=["Mozilla/5.0"])
    client_address: str = Field(description="Where it was made from.", examples=["192.0.2.7"])
    created_at: AwareDatetime = Field(description="When it was made.", examples=["2026-12-01T12:00:00Z"])
    last_used_at: AwareDatetime = Field(description="Last use, to the minute.", examples=["2026-12-01T12:00:00Z"])
    expires_at: AwareDatetime = Field(description="When it ends at the latest.", examples=["2026-12-08T12:00:00Z"])


class SignedIn(SessionView):
    user: UserView = Field(description="Who signed in.", examples=[{"name": "ada@example.org"}])
