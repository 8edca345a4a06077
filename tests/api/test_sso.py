"""Signing in by an OpenID Connect provider, a process of its own: who gets in, as whom, with which rights, and who does not."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import httpx2
import pytest
from pydantic import ValidationError

from controlplane.identity import oidc
from controlplane.settings import OidcSettings
from tests.api.oidc_provider import CLIENT, SECRET
from tests.api.process import ROOT
from tests.api.test_sign_in import PASSWORD, browser, signed_in

__all__ = ["browser"]


@pytest.fixture(scope="module")
def provider():
    """Its URL."""
    argv = [sys.executable, "-m", "tests.api.oidc_provider"]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.terminate()


@pytest.fixture
def set_up(api, provider, tmp_path):
    """Tells the API of the provider, with more settings."""
    (tmp_path / "secret").write_text(SECRET + "\n")

    def do(**more) -> None:
        base = {
            "issuer": f"{provider}/realm",
            "client_id": CLIENT,
            "client_secret_file": tmp_path / "secret",
            "name": "Example",
        }
        settings = OidcSettings(**(base | more))
        services = api.app.state.services
        api.app.state.services = replace(
            services, settings=services.settings.model_copy(update={"oidc": settings}), oidc=oidc.Provider(settings)
        )

    do()
    return do


async def signs_in(browser, provider, claims: dict | None = None, next_path: str = "/p/ours", **wrong) -> httpx2.Response:
    """The browser's whole way; what it is answered at the end of it."""
    async with httpx2.AsyncClient(trust_env=False) as outside:
        await outside.post(f"{provider}/next", json={"claims": claims or {}, **wrong})
        started = await browser.get("/v1/sessions/sso/start", params={"next": next_path})
        assert started.status_code == 303, started.text
        at_provider = await outside.get(started.headers["location"])
    assert at_provider.status_code == 302, at_provider.text
    return await browser.get(at_provider.headers["location"])


ADA = {"sub": "1234", "email": "Ada@example.org", "email_verified": True, "name": "Ada Lovelace"}


async def test_who_comes_the_first_time_has_an_account_and_no_right(set_up, provider, browser, operator):
    assert (await browser.get("/v1/sessions/methods")).json()["sso"] == {"name": "Example", "path": "/v1/sessions/sso/start"}
    answer = await signs_in(browser, provider, ADA)
    assert (answer.status_code, answer.headers["location"]) == (303, "/p/ours")
    cookie = next(value for value in answer.headers.get_list("set-cookie") if value.startswith("bedplate_session"))
    assert "httponly" in cookie.lower()
    assert "samesite=strict" in cookie.lower()
    me = (await browser.get("/v1/users/current")).json()
    assert (me["name"], me["display_name"], me["is_operator"]) == ("ada@example.org", "Ada Lovelace", False)
    assert (me["memberships"], me["has_password"], me["sso_issuer"]) == ([], False, f"{provider}/realm")
    assert (await browser.get("/v1/projects/ours")).status_code == 404

    await operator.post("/v1/projects/ours/members", json={"user": "ada@example.org", "role": "editor"})
    again = await signs_in(browser, provider, {**ADA, "email": "countess@example.org"})  # the subject counts, not the address
    assert again.headers["location"] == "/p/ours"
    assert (await browser.get("/v1/users/current")).json()["memberships"][0]["role"] == "editor"
    audit = (await operator.get("/v1/audit", params={"filter": "action=session.finish-sso"})).json()["items"]
    assert [entry["after"]["is_new"] for entry in audit] == [True, False]

    await operator.patch("/v1/users/ada@example.org", json={"is_disabled": True})
    refused = await signs_in(browser, provider, ADA)
    assert refused.headers["location"] == "/?refused=auth.sso_refused"


WRONG = [
    {"claims": {"nonce": "another"}},
    {"claims": {"nonce": None}},
    {"claims": {"aud": "another"}},
    {"claims": {"aud": ["bedplate", "another"]}},
    {"claims": {"iss": "https://another.test"}},
    {"claims": {"exp": 1_700_000_000}},
    {"claims": {"exp": None}},
    {"claims": {"sub": None}},
    {"signed": "by another"},
    {"signed": "by none"},
    {"signed": "by hmac"},
    {"back": {"state": "another"}},
    {"back": {"code": "another"}},
    {"back": {"error": "access_denied"}},
]


async def test_what_cannot_be_believed_lets_nobody_in(set_up, provider, browser, operator):
    for wrong in WRONG:
        others = {name: value for name, value in wrong.items() if name != "claims"}
        answer = await signs_in(browser, provider, {**ADA, **wrong.get("claims", {})}, **others)
        assert answer.headers["location"] == "/?refused=auth.sso_refused", wrong
        assert "bedplate_session" not in browser.cookies, wrong
    assert (await operator.get("/v1/users")).json()["items"] == []


async def test_another_browser_cannot_finish_what_this_one_began(set_up, provider, browser, anonymous):
    async with httpx2.AsyncClient(trust_env=False) as outside:
        await outside.post(f"{provider}/next", json={"claims": ADA})
        started = await browser.get("/v1/sessions/sso/start")
        back = (await outside.get(started.headers["location"])).headers["location"]
    assert (await anonymous.get(back)).headers["location"] == "/?refused=auth.sso_refused"
    assert (await browser.get(back)).headers["location"] == "/"
    assert (await browser.get(back)).headers["location"] == "/?refused=auth.sso_refused"  # once


async def test_new_keys_of_the_provider_are_learnt(set_up, provider, browser, api, monkeypatch):
    monkeypatch.setattr(oidc, "_KEYS_AGAIN_SECONDS", 0.0)
    for _ in range(2):
        assert (await signs_in(browser, provider, ADA, signed="by a new key")).headers["location"] == "/p/ours"


async def test_accounts_that_are_here_are_linked_only_by_policy_and_a_verified_address(set_up, provider, browser, operator):
    await signed_in(operator, browser, "ada@example.org")
    assert (await signs_in(browser, provider, ADA)).headers["location"] == "/?refused=auth.sso_refused"
    set_up(links_by_email=True)
    unverified = await signs_in(browser, provider, {**ADA, "email_verified": False})
    assert unverified.headers["location"] == "/p/ours"
    assert (await browser.get("/v1/users/current")).json()["name"].startswith("sso-")
    linked = await signs_in(browser, provider, {**ADA, "sub": "5678"})
    assert linked.headers["location"] == "/p/ours"
    me = (await browser.get("/v1/users/current")).json()
    assert (me["name"], me["has_password"]) == ("ada@example.org", True)
    second = await signs_in(browser, provider, {**ADA, "sub": "another with this address"})
    assert second.headers["location"] == "/?refused=auth.sso_refused"
    set_up(creates_people=False)
    assert (
        (await signs_in(browser, provider, {**ADA, "sub": "9", "email": "new@example.org"}))
        .headers["location"]
        .startswith("/?")
    )


async def test_groups_give_what_the_settings_say_and_take_it_back(set_up, provider, browser, operator):
    set_up(
        groups={
            "admins": ["operator"],
            "search": ["ours:editor", "theirs:viewer"],
            "leads": ["ours:admin"],
            "x": ["gone:admin"],
        }
    )

    async def rights(*groups: str) -> tuple[bool, dict[str, str]]:
        assert (await signs_in(browser, provider, {**ADA, "groups": list(groups)})).headers["location"] == "/p/ours"
        me = (await browser.get("/v1/users/current")).json()
        return me["is_operator"], {item["project"]: item["role"] for item in me["memberships"]}

    assert await rights("nothing of ours") == (False, {})
    assert await rights("search") == (False, {"ours": "editor", "theirs": "viewer"})
    assert await rights("search", "leads", "admins") == (True, {"ours": "admin", "theirs": "viewer"})
    assert await rights("leads", "x") == (False, {"ours": "admin"})
    assert await rights() == (False, {})


async def test_nobody_is_sent_elsewhere_afterwards(set_up, provider, browser):
    for path in ("//evil.test", "/\\evil.test", "https://evil.test", "/a\nb", "x"):
        assert (await signs_in(browser, provider, ADA, next_path=path)).headers["location"] == "/", path


async def test_a_provider_that_is_away_is_said_and_passwords_go_on(set_up, operator, browser, provider):
    set_up(issuer="http://127.0.0.1:9/realm")
    away = await browser.get("/v1/sessions/sso/start")
    assert (away.status_code, away.json()["code"]) == (503, "auth.sso_unavailable")
    set_up(issuer=f"{provider}/realm/")  # not what it calls itself
    assert (await browser.get("/v1/sessions/sso/start")).status_code == 503
    await signed_in(operator, browser, "bob")
    assert (await browser.post("/v1/sessions", json={"name": "bob", "password": PASSWORD})).status_code == 201


async def test_without_a_provider_there_is_none(browser):
    assert (await browser.get("/v1/sessions/methods")).json() == {"sso": None}
    assert (await browser.get("/v1/sessions/sso/start")).json()["code"] == "auth.sso_absent"
    assert (await browser.get("/v1/sessions/sso/finish")).headers["location"] == "/?refused=auth.sso_absent"


@pytest.mark.parametrize(
    "wrong", [{"issuer": "http://id.example.org"}, {"client_id": ""}, {"groups": {"a": ["ours:king"]}}, {"scopes": "email"}]
)
def test_settings_that_cannot_be_meant_are_refused(wrong):
    with pytest.raises(ValidationError):
        OidcSettings(**{"issuer": "https://id.example.org", "client_id": "bedplate", **wrong})
