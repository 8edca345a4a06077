"""Letting a program in by a code: the API, the command line, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from sqlalchemy import text

from controlplane.core.clock import ManualClock
from tests.api.test_sign_in import browser, signed_in

__all__ = ["browser"]


@pytest.fixture
def clock(api) -> ManualClock:
    stopped = ManualClock(datetime.now(UTC))
    api.app.state.services = replace(api.app.state.services, clock=stopped)
    return stopped


@pytest.fixture
async def ada(operator, browser):
    """A browser in which a viewer of our project is signed in."""
    await signed_in(operator, browser, "ada")
    await operator.post("/v1/projects/ours/members", json={"user": "ada", "role": "viewer"})
    return browser


async def begun(client, name: str = "bedplate on laptop") -> dict:
    answer = await client.post("/v1/logins", json={"client_name": name})
    assert answer.status_code == 201, answer.text
    return answer.json()


async def polled(client, login: dict) -> tuple[int, str]:
    answer = await client.post("/v1/logins/poll", json={"secret": login["secret"]})
    return answer.status_code, answer.json().get("code") or answer.json()["state"]


async def test_a_person_lets_a_program_in_once(api, ada, anonymous, operator, clock):
    login = await begun(anonymous)
    assert login["page"] == f"/device?code={login['user_code']}"
    assert await polled(anonymous, login) == (200, "pending")
    assert await polled(anonymous, login) == (429, "login.too_soon")

    shown = (await ada.get(f"/v1/logins/{login['user_code'].replace('-', '').lower()}")).json()
    assert (shown["client_name"], shown["client_address"], shown["state"]) == ("bedplate on laptop", "127.0.0.1", "pending")
    assert "secret" not in shown
    assert (await ada.post(f"/v1/logins/{login['user_code']}/approve")).json()["state"] == "approved"
    twice = await ada.post(f"/v1/logins/{login['user_code']}/deny")
    assert (twice.status_code, twice.json()["code"]) == (409, "login.answered")

    clock.advance(3)
    taken = (await anonymous.post("/v1/logins/poll", json={"secret": login["secret"]})).json()["token"]
    assert taken["expires_at"] is not None
    assert await polled(anonymous, login) == (401, "login.ended")
    async with api.client(taken["secret"]) as program:
        assert (await program.get("/v1/users/current")).json()["name"] == "ada"
        assert (await program.get("/v1/projects/ours/vms")).status_code == 200
        assert (await program.post("/v1/projects/ours/networks", json={"name": "n"})).status_code == 403
        assert [token["name"] for token in (await ada.get("/v1/tokens")).json()["items"]] == ["bedplate-on-laptop"]
        assert (await ada.delete("/v1/tokens/bedplate-on-laptop")).status_code == 204
        assert (await program.get("/v1/users/current")).status_code == 401
    audited = [entry["action"] for entry in (await operator.get("/v1/audit")).json()["items"]]
    assert [action for action in audited if action.startswith("login.")] == ["login.approve", "login.poll"]


async def test_two_logins_of_one_machine_have_two_tokens(ada, anonymous, clock):
    for _ in range(2):
        login = await begun(anonymous)
        await ada.post(f"/v1/logins/{login['user_code']}/approve")
        assert await polled(anonymous, login) == (200, "approved")
    assert len({token["name"] for token in (await ada.get("/v1/tokens")).json()["items"]}) == 2


async def test_a_denied_an_old_and_a_disabled_ones_login_give_nothing(ada, anonymous, operator, clock):
    denied, disabled = await begun(anonymous), await begun(anonymous)
    assert (await ada.post(f"/v1/logins/{denied['user_code']}/deny")).json()["state"] == "denied"
    assert await polled(anonymous, denied) == (403, "login.denied")
    assert await polled(anonymous, denied) == (401, "login.ended")
    await ada.post(f"/v1/logins/{disabled['user_code']}/approve")
    old = await begun(anonymous)
    await ada.post(f"/v1/logins/{old['user_code']}/approve")
    clock.advance(10 * 60)
    assert await polled(anonymous, old) == (401, "login.ended")
    assert (await ada.get(f"/v1/logins/{old['user_code']}")).status_code == 404
    clock.advance(-60)
    await operator.patch("/v1/users/ada", json={"is_disabled": True})
    assert await polled(anonymous, disabled) == (403, "login.denied")


async def test_only_a_signed_in_person_answers(api, ada, anonymous, operator, member, clock):
    """A token would give more than it has: its end and its scopes are not those of its person."""
    login = await begun(anonymous)
    path = f"/v1/logins/{login['user_code']}"
    assert (await anonymous.post(f"{path}/approve")).status_code == 401
    assert (await member.get(path)).status_code == 404
    made = await ada.post("/v1/tokens", json={"name": "t", "role": "user"})
    async with api.client(made.json()["secret"]) as program:
        for client in (program, operator):
            refused = await client.post(f"{path}/approve")
            assert (refused.status_code, refused.json()["code"]) == (403, "login.needs_session")
    ada.headers["sec-fetch-site"] = "cross-site"
    assert (await ada.post(f"{path}/approve")).json()["code"] == "auth.cross_site"
    assert await polled(anonymous, login) == (200, "pending")


async def test_guesses_at_codes_and_secrets_end_and_so_do_those_who_wait(api, ada, anonymous, clock):
    for number in range(20):
        await begun(anonymous, f"program {number}")
    too_many = await anonymous.post("/v1/logins", json={"client_name": "one more"})
    assert (too_many.status_code, too_many.json()["code"]) == (429, "login.too_many")
    assert int(too_many.headers["retry-after"]) == 600
    codes = [(await ada.get("/v1/logins/BBBB-BBBB")).json()["code"] for _ in range(25)]
    assert set(codes) == {"login.not_found"}
    secrets = [await polled(anonymous, {"secret": f"bpd_{number}"}) for number in range(25)]
    assert set(secrets) == {(401, "login.ended")}
    for answer in (await ada.get("/v1/logins/CCCC-CCCC"), await anonymous.post("/v1/logins", json={"client_name": "x"})):
        assert (answer.status_code, answer.json()["code"]) == (429, "auth.address_locked")


@pytest.mark.parametrize("name", ["", "<b>", "two\nlines", "x" * 64, "\u202etxt"])
async def test_a_name_is_what_a_person_can_read(anonymous, name):
    assert (await anonymous.post("/v1/logins", json={"client_name": name})).json()["code"] == "request.invalid"


async def test_what_is_over_is_removed(api, anonymous):
    await begun(anonymous)
    async with api.database.session() as session:
        await session.execute(text("UPDATE login SET expires_at = now() - interval '1 s'"))
    await api.app.state.services.events._clean()
    async with api.database.session() as session:
        assert await session.scalar(text("SELECT count(*) FROM login")) == 0
