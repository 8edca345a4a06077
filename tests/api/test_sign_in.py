"""People: one-time link, password, one-time code, lock-out, sessions that end on the server, and other sites."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import httpx2
import pyotp
import pytest
from sqlalchemy import text

from controlplane.core.clock import ManualClock
from controlplane.identity import guessing
from controlplane.identity.errors import AddressLocked
from controlplane.identity.service import ensure_first_user

PASSWORD = "correct horse battery staple"
SAME_SITE = {"sec-fetch-site": "same-origin"}


@pytest.fixture
async def browser(api):
    """Keeps cookies, and says that its pages are ours."""
    async with contextlib.aclosing(api.client(None)) as client:
        client.headers.update(SAME_SITE)
        yield client


async def invited(operator, name: str, **more) -> str:
    made = await operator.post("/v1/users", json={"name": name, **more})
    assert made.status_code == 201, made.text
    return made.json()["link"].partition("#")[2]


async def signed_in(operator, browser, name: str, **more) -> dict:
    answer = await browser.post(
        "/v1/sessions/redeem", json={"link": await invited(operator, name, **more), "password": PASSWORD}
    )
    assert answer.status_code == 201, answer.text
    return answer.json()


async def test_life_of_a_person(operator, browser, api):
    link = await invited(operator, "ada@example.org", display_name="Ada")
    redeemed = await browser.post("/v1/sessions/redeem", json={"link": link, "password": PASSWORD})
    assert redeemed.status_code == 201
    cookie = redeemed.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "bps_" not in redeemed.text
    again = await browser.post("/v1/sessions/redeem", json={"link": link, "password": PASSWORD + "2"})
    assert (again.status_code, again.json()["code"]) == (401, "session.link_invalid")

    me = (await browser.get("/v1/users/current")).json()
    assert (me["name"], me["memberships"], me["has_password"]) == ("ada@example.org", [], True)
    assert (await browser.get("/v1/projects")).json()["items"] == []
    assert (await browser.get("/v1/projects/ours/vms")).status_code == 404

    joined = await operator.post("/v1/projects/ours/members", json={"user": "ada@example.org", "role": "viewer"})
    assert (joined.status_code, joined.json()["user_name"]) == (201, "ada@example.org")
    assert (await browser.get("/v1/projects/ours/vms")).status_code == 200
    body = {"name": "n", "network": "x"}
    refused = await browser.post("/v1/projects/ours/networks", json=body)
    assert (refused.status_code, refused.json()["code"]) == (403, "auth.forbidden")
    assert "editor" in refused.json()["detail"]
    assert (await operator.patch("/v1/projects/ours/members/ada@example.org", json={"role": "editor"})).status_code == 200
    assert (await browser.post("/v1/projects/ours/networks", json={"name": "n"})).status_code == 201
    assert (await browser.post("/v1/projects/ours/members", json={"user": "admin", "role": "admin"})).status_code == 403

    audit = (await operator.get("/v1/projects/ours/audit")).json()["items"]
    assert {"member.create", "member.update", "network.create"} <= {entry["action"] for entry in audit}
    assert next(entry for entry in audit if entry["action"] == "network.create")["actor_name"] == "ada@example.org"

    assert (await operator.delete("/v1/projects/ours/members/ada@example.org")).status_code == 204
    assert (await browser.get("/v1/projects/ours")).status_code == 404
    secret = browser.cookies["bedplate_session"]
    assert (await browser.delete("/v1/sessions/current")).status_code == 204
    browser.cookies.set("bedplate_session", secret)
    ended = await browser.get("/v1/users/current")
    assert (ended.status_code, ended.json()["code"]) == (401, "auth.session_ended")


async def test_wrong_passwords_lock_the_account_and_say_for_how_long(operator, browser, anonymous, api):
    await signed_in(operator, browser, "bob")
    answers = [await anonymous.post("/v1/sessions", json={"name": "bob", "password": "wrong"}) for _ in range(6)]
    assert [answer.json()["code"] for answer in answers] == ["session.refused"] * 5 + ["user.locked"]
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 16
    right = await anonymous.post("/v1/sessions", json={"name": "bob", "password": PASSWORD})
    assert right.status_code == 429
    shown = (await operator.get("/v1/users/bob")).json()
    assert shown["locked_until"] is not None
    async with api.database.sessionmaker.begin() as session:
        await session.execute(text("""UPDATE "user" SET locked_until = now() - interval '1 s' WHERE name = 'bob'"""))
    assert (await anonymous.post("/v1/sessions", json={"name": "bob", "password": PASSWORD})).status_code == 201
    assert (await operator.get("/v1/users/bob")).json()["locked_until"] is None
    refused = [entry for entry in (await operator.get("/v1/audit")).json()["items"] if entry["action"] == "user.refused"]
    assert len(refused) == 5


async def test_failures_at_once_are_all_counted(operator, browser, anonymous):
    await signed_in(operator, browser, "eve")
    attempts = [anonymous.post("/v1/sessions", json={"name": "eve", "password": f"guess {number}"}) for number in range(12)]
    codes = [answer.json()["code"] for answer in await asyncio.gather(*attempts)]
    assert codes.count("session.refused") == 5
    assert codes.count("user.locked") == 7


async def test_one_time_codes(operator, browser, anonymous, api):
    await signed_in(operator, browser, "carol")
    secret = (await browser.post("/v1/users/current/start-totp", json={"password": PASSWORD})).json()["secret"]
    totp = pyotp.TOTP(secret)
    now = api.app.state.services.clock.now()
    wrong = await browser.post("/v1/users/current/confirm-totp", json={"code": totp.at(now - timedelta(hours=1))})
    assert (wrong.status_code, wrong.json()["code"]) == (422, "user.code_wrong")
    code = totp.at(now)
    assert (await browser.post("/v1/users/current/confirm-totp", json={"code": code})).json()["has_totp"] is True

    sign_in = {"name": "carol", "password": PASSWORD}
    needed = await anonymous.post("/v1/sessions", json=sign_in)
    assert (needed.status_code, needed.json()["code"]) == (401, "session.code_needed")
    replayed = await anonymous.post("/v1/sessions", json={**sign_in, "code": code})
    assert replayed.json()["code"] == "session.refused"
    later = totp.at(now + timedelta(seconds=30))
    assert (await anonymous.post("/v1/sessions", json={**sign_in, "code": later})).status_code == 201

    link = (await operator.post("/v1/users/carol/invite")).json()["link"].partition("#")[2]
    again = await anonymous.post("/v1/sessions/redeem", json={"link": link, "password": PASSWORD + "!"})
    assert again.json()["user"]["has_totp"] is False
    assert (await browser.get("/v1/users/current")).status_code == 401


@pytest.mark.parametrize("headers", [{}, {"sec-fetch-site": "cross-site"}, {"origin": "http://evil.test"}])
async def test_another_site_changes_nothing_with_our_cookie(operator, browser, headers):
    await signed_in(operator, browser, "dave")
    for name in SAME_SITE:
        del browser.headers[name]
    refused = await browser.post("/v1/users/current/start-totp", headers=headers, json={"password": PASSWORD})
    assert (refused.status_code, refused.json()["code"]) == (403, "auth.cross_site")
    assert (await browser.get("/v1/users/current", headers=headers)).status_code == 200
    ours = {"origin": "http://api.test"}
    body = {"password": PASSWORD}
    assert (await browser.post("/v1/users/current/start-totp", headers=ours, json=body)).status_code == 200


async def test_passwords_and_people_that_are_refused(operator, browser):
    link = await invited(operator, "frank-the-tenth")
    for weak in ("short", "Frank-The-Tenth"):
        answer = await browser.post("/v1/sessions/redeem", json={"link": link, "password": weak})
        assert (answer.status_code, answer.json()["code"]) == (422, "user.password_weak")
    assert (await operator.post("/v1/users", json={"name": "frank-the-tenth"})).json()["code"] == "user.name_taken"
    assert (await operator.post("/v1/users", json={"name": "Frank"})).json()["code"] == "request.invalid"
    unknown = await operator.post("/v1/projects/ours/members", json={"user": "nobody", "role": "viewer"})
    assert (unknown.status_code, unknown.json()["code"]) == (404, "member.user_unknown")
    assert (await operator.get("/v1/users/current")).json()["code"] == "user.not_found"

    await browser.post("/v1/sessions/redeem", json={"link": link, "password": PASSWORD})
    wrong = await browser.post("/v1/users/current/password", json={"current": "not it at all", "new": PASSWORD + "2"})
    assert (wrong.status_code, wrong.json()["code"]) == (422, "user.password_wrong")
    changed = await browser.post("/v1/users/current/password", json={"current": PASSWORD, "new": PASSWORD + "2"})
    assert changed.status_code == 200, changed.text
    assert (await operator.patch("/v1/users/frank-the-tenth", json={"is_disabled": True})).status_code == 200
    assert (await browser.get("/v1/users/current")).status_code == 401
    disabled = await browser.post("/v1/sessions", json={"name": "frank-the-tenth", "password": PASSWORD + "2"})
    assert disabled.json()["code"] == "session.refused"


async def test_personal_and_project_tokens_give_no_more_than_one_has(operator, browser, api):
    await signed_in(operator, browser, "grace")
    await operator.post("/v1/projects/ours/members", json={"user": "grace", "role": "admin"})
    for body, status, code in (
        ({"name": "t", "role": "operator"}, 403, "token.role_forbidden"),
        ({"name": "t", "role": "editor", "project": "theirs"}, 404, "project.not_found"),
        ({"name": "t", "role": "editor"}, 422, "token.role_invalid"),
        ({"name": "t", "role": "user", "project": "ours"}, 422, "token.role_invalid"),
        ({"name": "t", "role": "user", "scopes": ["everything"]}, 422, "request.invalid"),
    ):
        answer = await browser.post("/v1/tokens", json=body)
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    made = await browser.post("/v1/tokens", json={"name": "laptop", "role": "user", "scopes": ["vm.*", "token.create"]})
    assert made.status_code == 201, made.text
    async with api.client(made.json()["secret"]) as program:
        assert (await program.get("/v1/projects/ours/vms")).status_code == 200
        narrowed = await program.get("/v1/projects/ours/networks")
        assert (narrowed.status_code, narrowed.json()["code"]) == (403, "auth.forbidden")
        wider = await program.post("/v1/tokens", json={"name": "wider", "role": "user"})
        assert (wider.status_code, wider.json()["code"]) == (422, "token.scope_invalid")
        assert (await browser.post("/v1/tokens", json={"name": "ci", "role": "viewer", "project": "ours"})).status_code == 201
        assert {item["name"] for item in (await browser.get("/v1/tokens")).json()["items"]} >= {"laptop", "ci"}
        assert (await operator.patch("/v1/projects/ours/members/grace", json={"role": "viewer"})).status_code == 200
        assert [item["name"] for item in (await browser.get("/v1/tokens")).json()["items"]] == ["laptop"]
        assert (await browser.delete("/v1/tokens/ci")).status_code == 204  # not hers to see, so nothing happens
        assert (await operator.get("/v1/tokens/ci")).status_code == 200
        assert (await operator.delete("/v1/users/grace")).status_code == 204
        assert (await program.get("/v1/projects/ours/vms")).status_code == 401
    assert (await operator.get("/v1/tokens/laptop")).status_code == 404


async def test_the_first_operator_comes_by_a_link_in_the_state_directory(database, anonymous, tmp_path):
    path = tmp_path / "operator-link"
    for _ in range(2):
        async with database.sessionmaker.begin() as session:
            await ensure_first_user(session, tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    first = await anonymous.post("/v1/sessions/redeem", json={"link": path.read_text().strip(), "password": PASSWORD})
    assert (first.status_code, first.json()["user"]["is_operator"]) == (201, True)
    async with database.sessionmaker.begin() as session:
        await ensure_first_user(session, tmp_path)
    assert not path.exists()


async def test_a_project_admin_governs_people_not_the_deployment(operator, browser):
    await signed_in(operator, browser, "heidi")
    await operator.post("/v1/projects/ours/members", json={"user": "heidi", "role": "admin"})
    assert (await browser.patch("/v1/projects/ours", json={"description": "ours"})).status_code == 200
    containers = await browser.patch("/v1/projects/ours", json={"allow_containers": True})
    assert (containers.status_code, containers.json()["code"]) == (403, "project.containers_forbidden")
    assert (await browser.patch("/v1/projects/ours", json={"quota": {"vms": 9}})).json()["code"] == "project.quota_forbidden"


async def test_a_narrowed_or_ending_operator_token_makes_no_operator(operator, api):
    soon = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    await operator.post("/v1/users", json={"name": "ivan"})
    for number, narrowing in enumerate(({"scopes": ["user.*", "token.create"]}, {"expires_at": soon})):
        made = await operator.post("/v1/tokens", json={"name": f"narrow-{number}", "role": "operator", **narrowing})
        async with api.client(made.json()["secret"]) as narrow:
            for answer in (
                await narrow.post("/v1/users", json={"name": "mallory", "is_operator": True}),
                await narrow.patch("/v1/users/ivan", json={"is_operator": True}),
                await narrow.post("/v1/users/ivan/invite"),
            ):
                assert (answer.status_code, answer.json()["code"]) == (403, "user.token_narrowed")
            longer = await narrow.post("/v1/tokens", json={"name": "longer", "role": "operator", "scopes": ["user.*"]})
            assert longer.status_code == (201 if "scopes" in narrowing else 422), longer.text


async def test_guesses_behind_a_session_count_and_a_link_ends_the_lock(operator, browser, anonymous):
    await signed_in(operator, browser, "judy")
    wrong = {"current": "not the password", "new": PASSWORD + "2"}
    codes = [(await browser.post("/v1/users/current/password", json=wrong)).json()["code"] for _ in range(6)]
    assert codes == ["user.password_wrong"] * 5 + ["user.locked"]
    assert (await browser.post("/v1/users/current/remove-totp", json={"password": PASSWORD})).json()["code"] == "user.locked"
    link = (await operator.post("/v1/users/judy/invite")).json()["link"].partition("#")[2]
    assert (await anonymous.post("/v1/sessions/redeem", json={"link": link, "password": PASSWORD + "3"})).status_code == 201
    assert (await anonymous.post("/v1/sessions", json={"name": "judy", "password": PASSWORD + "3"})).status_code == 201
    actions = {entry["action"] for entry in (await operator.get("/v1/audit")).json()["items"]}
    assert {"user.refused", "user.redeem"} <= actions


def _without_times(answer) -> tuple:
    body = {name: value for name, value in answer.json().items() if name != "request_id"}
    return answer.status_code, answer.headers.get("retry-after"), body


async def test_a_name_that_nobody_has_is_locked_like_one_that_somebody_has(operator, browser, anonymous, api):
    """Also when both are asked at once, and after the lock has ended."""
    await signed_in(operator, browser, "bob")
    api.app.state.services = replace(api.app.state.services, clock=ManualClock(datetime.now(UTC)))
    for end_lock in (False, True):
        if end_lock:
            api.app.state.services.clock.advance(16)
        for _ in range(7):
            there, absent = await asyncio.gather(
                *(anonymous.post("/v1/sessions", json={"name": name, "password": "wrong"}) for name in ("bob", "nobody"))
            )
            assert _without_times(there) == _without_times(absent)
        assert there.json()["code"] == "user.locked"
    async with api.database.sessionmaker() as session:
        stored = "\n".join(await session.scalars(text("SELECT row_to_json(attempt)::text FROM attempt")))
    assert "nobody" not in stored


async def test_an_address_that_guesses_at_many_names_is_refused_whatever_the_name(operator, browser, anonymous, api):
    await signed_in(operator, browser, "ada")
    services = api.app.state.services
    few = services.settings.model_copy(
        update={"api": services.settings.api.model_copy(update={"sign_in_failures_per_address": 6})}
    )
    api.app.state.services = replace(services, settings=few, clock=ManualClock(datetime.now(UTC)))
    for number in range(6):
        guess = await anonymous.post("/v1/sessions", json={"name": f"name-{number}", "password": PASSWORD})
        assert guess.json()["code"] == "session.refused"
    right = {"name": "ada", "password": PASSWORD}
    for path, body in (("", right), ("/redeem", {"link": "bpl_guess", "password": PASSWORD})):
        refused = await anonymous.post(f"/v1/sessions{path}", json=body)
        assert (refused.status_code, refused.json()["code"]) == (429, "auth.address_locked")
    assert 890 <= int(refused.headers["retry-after"]) <= 901
    assert (await browser.get("/v1/users/current")).status_code == 200  # who is in stays in
    elsewhere = httpx2.ASGITransport(app=api.app, client=("198.51.100.7", 1))
    async with httpx2.AsyncClient(transport=elsewhere, base_url="http://api.test") as other:
        assert (await other.post("/v1/sessions", json=right)).status_code == 201
    api.app.state.services.clock.advance(15 * 60)
    assert (await anonymous.post("/v1/sessions", json=right)).status_code == 201


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
    ],
)
async def test_what_counts_as_one_address(database, one, other, is_same):
    now = datetime.now(UTC)
    async with database.sessionmaker.begin() as session:
        await guessing.count_address(session, one, now, most=1)
        if is_same:
            with pytest.raises(AddressLocked):
                await guessing.refuse_address(session, other, now)
        else:
            await guessing.refuse_address(session, other, now)


async def test_names_of_tokens_are_their_owners(operator, browser, api):
    """Nobody is told, or hindered by, what others call theirs; an operator who means one of several says which."""
    await signed_in(operator, browser, "ada")
    async with contextlib.aclosing(api.client(None)) as other:
        other.headers.update(SAME_SITE)
        await signed_in(operator, other, "bob")
        ids = []
        for client in (browser, other):
            made = await client.post("/v1/tokens", json={"name": "laptop", "role": "user"})
            assert made.status_code == 201, made.text
            ids.append(made.json()["id"])
            twice = await client.post("/v1/tokens", json={"name": "laptop", "role": "user"})
            assert (twice.status_code, twice.json()["code"]) == (409, "token.name_taken")
        for project in ("ours", "theirs"):
            assert (await operator.post("/v1/tokens", json={"name": "laptop", "project": project})).status_code == 201
        assert (await browser.get("/v1/tokens/laptop")).json()["id"] == ids[0]
        for answer in (await operator.get("/v1/tokens/laptop"), await operator.delete("/v1/tokens/laptop")):
            assert (answer.status_code, answer.json()["code"]) == (409, "token.name_ambiguous")
            assert set(ids) < set(answer.json()["context"]["ids"])
        assert (await operator.delete(f"/v1/tokens/{ids[1]}")).status_code == 204
        assert (await other.get("/v1/tokens")).json()["items"] == []


async def test_what_becomes_of_tokens_when_who_made_them_goes(operator, browser, api):
    """Those of a project stay and name their maker; an operator's, and what was made with it, end with the operator."""
    person = (await signed_in(operator, browser, "ada", is_operator=True))["user"]["id"]
    made = {}
    for name, body in {"ci": {"project": "ours"}, "root": {"role": "operator"}, "mine": {"role": "user"}}.items():
        made[name] = (await browser.post("/v1/tokens", json={"name": name, **body})).json()["secret"]
    async with api.client(made["root"]) as root:
        second = await root.post("/v1/tokens", json={"name": "second", "role": "operator"})
        made["second"] = second.json()["secret"]
        assert second.json()["maker_id"] == person

    async def alive() -> set[str]:
        found = set()
        for name, secret in made.items():
            async with api.client(secret) as client:
                if (await client.get("/v1/tokens/current")).status_code == 200:
                    found.add(name)
        return found

    assert await alive() == {"ci", "root", "mine", "second"}
    assert (await operator.patch("/v1/users/ada", json={"is_operator": False})).status_code == 200
    assert await alive() == {"ci", "mine"}
    assert (await operator.patch("/v1/users/ada", json={"is_operator": True, "is_disabled": True})).status_code == 200
    assert await alive() == {"ci"}
    assert (await operator.patch("/v1/users/ada", json={"is_disabled": False})).status_code == 200
    assert await alive() == {"ci", "root", "mine", "second"}
    assert (await operator.delete("/v1/users/ada")).status_code == 204
    assert await alive() == {"ci"}
    left = (await operator.get("/v1/tokens", params={"filter": f"maker_id={person}"})).json()["items"]
    assert [token["name"] for token in left] == ["ci"]
