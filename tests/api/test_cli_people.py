"""`bedplate user` and `bedplate member`."""

from __future__ import annotations

from tests.api.test_cli import api, bedplate, home, server_url

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
