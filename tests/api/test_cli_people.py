"""`bedplate user` and `bedplate member`."""

from __future__ import annotations

import httpx2
import pytest

from controlplane.resources.login import service as logins
from tests.api.test_cli import _subprocess, api, bedplate, home, server_url
from tests.api.test_sign_in import PASSWORD, SAME_SITE

__all__ = ["api", "bedplate", "home", "server_url"]


def test_people_and_members(api, bedplate):
    link = bedplate("user", "create", "ada@example.org", "--display-name", "Ada").out.strip()
    assert link.startswith(f"{api.url}/welcome#bpl_")
    assert bedplate("user", "invite", "ada@example.org").out.strip() not in {"", link}
    assert bedplate("project", "create", "web").code == 0
    assert bedplate("member", "add", "ada@example.org", "viewer", "-p", "web").code == 0
    assert bedplate("member", "set", "ada@example.org", "admin", "-p", "web").code == 0
    assert "admin" in bedplate("member", "list", "-p", "web").out
    assert bedplate("member", "set", "ada@example.org", "king", "-p", "web").code == 2
    assert bedplate("member", "add", "nobody", "-p", "web").code == 3
    assert bedplate("member", "remove", "ada@example.org", "-p", "web", "--yes").code == 0
    assert "ada" not in bedplate("member", "list", "-p", "web").out
    assert bedplate("token", "create", "ci", "--role", "viewer", "--scope", "vm.*", "-p", "web").out.startswith("bpt_")
    assert bedplate("user", "update", "ada@example.org", "--disable", "-o", "json").json()["is_disabled"] is True
    assert bedplate("user", "delete", "ada@example.org", "--yes").code == 0


@pytest.fixture
def person(api, bedplate):
    """A browser in which Ada is signed in, an editor of the project `web`."""
    link = bedplate("user", "create", "ada").out.strip().partition("#")[2]
    bedplate("project", "create", "web")
    bedplate("member", "add", "ada", "editor", "-p", "web")
    with httpx2.Client(base_url=api.url, headers=SAME_SITE, trust_env=False) as browser:
        assert browser.post("/v1/sessions/redeem", json={"link": link, "password": PASSWORD}).status_code == 201
        yield browser


@pytest.mark.parametrize("answer", ["approve", "deny"])
def test_login_by_a_code_that_a_person_approves(api, person, bedplate, home, monkeypatch, answer):
    monkeypatch.delenv("BEDPLATE_URL")
    with _subprocess("login", api.url, "--device") as process:
        page = process.stdout.readline().split()[1]
        code = process.stdout.readline().split()[-1]
        assert page == f"{api.url}/device?code={code}"
        assert person.post(f"/v1/logins/{code}/{answer}").status_code == 200
        assert process.wait(30) == (0 if answer == "approve" else 4)
        words = process.stderr.read()
    if answer == "deny":
        assert "login.denied" in words
        return
    assert "project web" in words
    assert "bpt_" not in words
    (token,) = person.get("/v1/tokens").json()["items"]
    assert bedplate("token", "current", "-o", "json").json()["id"] == token["id"]
    assert bedplate("network", "list").code == 0
    assert bedplate("token", "revoke", token["name"], "--yes").code == 0
    assert bedplate("network", "list").code == 4


def test_login_that_nobody_approves_ends(api, bedplate, monkeypatch):
    monkeypatch.setattr(logins, "LIFE", logins.INTERVAL)
    ran = bedplate("login", api.url, "--device")
    assert ran.code == 7
    assert "nobody approved" in ran.err
    refused = bedplate("login", "http://192.0.2.1:8700", "--device")
    assert (refused.code, refused.out) == (2, "")
