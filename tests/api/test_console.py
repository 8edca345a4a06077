"""The console in a real browser over the real API: signing in, the way through every page, what is refused, accessibility."""

from __future__ import annotations

import re
from pathlib import Path

import httpx2
import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

from controlplane.api import console
from controlplane.identity.service import ensure_first_user
from tests.api.test_cli import api, bedplate, home, server_url

__all__ = ["api", "bedplate", "home", "server_url"]

pytestmark = pytest.mark.caps("console")
AXE = Path(console.__file__).parents[1] / "console/node_modules/axe-core/axe.min.js"
PASSWORD = "correct horse battery staple"
PAGES = [
    *(
        f"/p/web{page}"
        for page in ("", "/vms", "/networks", "/firewalls", "/addresses", "/loadbalancers", "/volumes", "/snapshots")
    ),
    *(f"/p/web/{page}" for page in ("endpoints", "routes", "keys", "members", "audit")),
    *(
        f"/{page}"
        for page in (
            "models",
            "hosts",
            "images",
            "pools",
            "projects",
            "users",
            "tokens",
            "incidents",
            "operations",
            "storage-pools",
            "providers",
            "prices",
        )
    ),
]


@pytest.fixture
async def browser():
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield opened
        await opened.close()


@pytest.fixture
async def page(browser: Browser, api):
    """A page whose console must stay silent: a refused script, a failed request or an exception is a failure."""
    context = await browser.new_context(
        base_url=api.url, permissions=["clipboard-read", "clipboard-write"], reduced_motion="reduce"
    )
    context.set_default_timeout(10_000)
    opened = await context.new_page()
    said: list[str] = []
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on(
        "console", lambda line: said.append(line.text) if line.type == "error" and "Failed to load" not in line.text else None
    )
    yield opened
    await context.close()
    assert said == []


@pytest.fixture
async def operator(page: Page, api, bedplate, tmp_path) -> Page:
    api.execute(lambda session: ensure_first_user(session, tmp_path))
    await page.goto(f"/welcome#{(tmp_path / 'operator-link').read_text().strip()}")
    await page.get_by_label("Password, at least 12 characters").fill(PASSWORD)
    await page.get_by_label("Once more").fill(PASSWORD)
    await page.get_by_role("button", name="Open the account").click()
    await expect(page.get_by_role("button", name="Sign out")).to_be_visible()
    assert bedplate("project", "create", "web").code == 0
    return page


async def serious(page: Page) -> list[str]:
    await page.evaluate(AXE.read_text())
    found = await page.evaluate("async () => (await axe.run()).violations")
    return [f"{item['id']}: {item['nodes'][0]['html']}" for item in found if item["impact"] in {"serious", "critical"}]


async def test_sign_in_wrong_and_right_and_out(operator: Page):
    await operator.get_by_role("button", name="Sign out").click()
    await operator.get_by_label("Name").fill("admin")
    await operator.get_by_label("Password").fill("wrong")
    await operator.get_by_role("button", name="Sign in").click()
    await expect(operator.get_by_role("alert")).to_contain_text("session.refused")
    await operator.get_by_label("Password").fill(PASSWORD)
    await operator.get_by_role("button", name="Sign in").click()
    await expect(operator.get_by_role("button", name="Sign out")).to_be_visible()


async def test_life_of_a_key_and_a_network(operator: Page, bedplate):
    page = operator
    await page.goto("/p/web/keys")
    await expect(page.get_by_text("bedplate key create app")).to_be_visible()
    await page.get_by_role("button", name="New key").click()
    await page.get_by_role("button", name="Create").click()
    await expect(page.get_by_role("alert")).to_have_text(re.compile("is needed"))
    await page.get_by_label("name").fill("<img src=x onerror=alert(1)>")
    await page.get_by_role("button", name="Create").click()
    await expect(page.get_by_role("alert").last).to_contain_text("request.invalid")
    await page.get_by_label("name").fill("app")
    await page.get_by_role("button", name="Create").click()
    await expect(page.get_by_role("dialog")).to_contain_text("Shown this once")
    await page.keyboard.press("Escape")
    await expect(page.get_by_role("link", name="app")).to_be_visible()

    assert bedplate("key", "create", "other", "-p", "web").code == 0  # by another way: the page hears of it
    await expect(page.get_by_role("link", name="other")).to_be_visible()
    await page.get_by_label("Search Keys").fill("oth")
    await expect(page.get_by_role("link", name="app", exact=True)).to_have_count(0)
    assert "q=oth" in page.url
    await page.get_by_label("Search Keys").fill("")
    await page.get_by_label("Choose all").check()
    await page.get_by_role("button", name="Revoke 2").click()
    await expect(page.get_by_role("dialog").get_by_role("button", name="Revoke")).to_be_disabled()
    await page.get_by_label(re.compile("Type 2")).fill("2")
    await page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    await expect(page.get_by_text("No keys here yet.")).to_be_visible()


async def test_two_who_change_one_thing_see_both_values(operator: Page, bedplate):
    page = operator
    await page.goto("/projects")
    await page.get_by_role("link", name="web").click()
    await page.get_by_role("button", name="Change").click()
    await page.get_by_label("description").fill("mine")
    assert bedplate("project", "update", "web", "--description", "theirs").code == 0
    await page.get_by_role("button", name="Save", exact=True).click()
    await expect(page.get_by_role("alert").first).to_contain_text("Somebody changed it meanwhile")
    await expect(page.get_by_role("cell", name="theirs")).to_be_visible()
    await expect(page.get_by_role("cell", name="mine")).to_be_visible()
    await page.get_by_role("button", name="Save mine over it").click()
    await page.get_by_role("button", name="Save", exact=True).click()
    await expect(page.get_by_role("dialog")).to_have_count(0)
    assert bedplate("project", "show", "web", "-o", "json").json()["description"] == "mine"


@pytest.mark.parametrize("is_cookie_gone", [True, False])
async def test_a_session_that_ends_in_mid_form_loses_nothing_typed(operator: Page, api, is_cookie_gone):
    page = operator
    await page.goto("/p/web/networks")
    await page.get_by_role("button", name="New network").click()
    await page.get_by_label("name").fill("kept")
    if is_cookie_gone:
        await page.context.clear_cookies()
    else:
        api.sql("DELETE FROM session")
    await page.get_by_role("button", name="Create").dispatch_event("click")  # the sign-in may lie over it already
    again = page.get_by_role("dialog", name="Sign in again")
    await again.get_by_label("Name").fill("admin")
    await again.get_by_label("Password").fill(PASSWORD)
    await again.get_by_role("button", name="Sign in").click()
    await expect(again).to_have_count(0)
    await expect(page.get_by_label("name")).to_have_value("kept")
    await page.get_by_role("button", name="Create").click()
    await expect(page.get_by_role("heading", name="kept")).to_be_visible()


async def test_a_viewer_sees_what_is_refused_and_why(operator: Page, browser: Browser, api, bedplate):
    assert bedplate("network", "create", "default", "-p", "web").code == 0
    link = bedplate("user", "create", "vera").out.strip()
    assert bedplate("member", "add", "vera", "viewer", "-p", "web").code == 0
    async with await browser.new_context(base_url=api.url) as context:
        page = await context.new_page()
        await page.goto(link)
        await page.get_by_label("Password, at least 12 characters").fill(PASSWORD)
        await page.get_by_label("Once more").fill(PASSWORD)
        await page.get_by_role("button", name="Open the account").click()
        await expect(page.get_by_role("link", name="Hosts")).to_have_count(0)
        await page.get_by_role("link", name="Networks", exact=True).click()
        new = page.get_by_role("button", name="New network")
        await expect(new).to_have_attribute("aria-disabled", "true")
        await new.hover()
        await expect(page.get_by_role("tooltip")).to_contain_text("yours is viewer")
        await page.get_by_role("button", name="Actions of default").click()
        await expect(page.get_by_role("menuitem", name="Delete")).to_contain_text("yours is viewer")


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_every_page_is_readable_by_everybody(operator: Page, bedplate, theme):
    assert bedplate("key", "create", "app", "-p", "web").code == 0
    await operator.evaluate("theme => localStorage.setItem('bedplate.theme', theme)", theme)
    found = {}
    for path in PAGES:
        await operator.goto(path)
        await expect(operator.get_by_role("heading", level=1)).to_be_visible()
        await expect(operator.get_by_text("Loading…")).to_have_count(0)
        await expect(operator.get_by_role("alert")).to_have_count(0)
        if wrong := await serious(operator):
            found[path] = wrong
    assert found == {}


async def test_ten_thousand_rows_stay_quick(operator: Page, api):
    api.sql(
        "INSERT INTO token (id, name, role, secret_sha256, hint) "
        "SELECT 'tok_' || lpad(n::text, 26, '0'), 'many-' || n, 'operator', sha256(n::text::bytea), 'abcd' "
        "FROM generate_series(1, 9990) n"
    )
    await operator.goto("/tokens")
    await expect(operator.get_by_role("status").filter(has_text="in all")).to_contain_text("999")
    assert await operator.locator("tbody tr").count() < 100
    took = await operator.evaluate(
        """async () => {
            const box = document.querySelector('[role=region]');
            const begun = performance.now();
            for (let step = 1; step <= 20; step++) {
              box.scrollTop = step * 15000;
              await new Promise(requestAnimationFrame);
            }
            return (performance.now() - begun) / 20;
        }"""
    )
    assert took < 100, f"{took:.0f} ms a frame"


async def test_a_program_is_let_in_by_its_code(operator: Page, api):
    async with httpx2.AsyncClient(base_url=api.url, trust_env=False) as program:
        begun = (await program.post("/v1/logins", json={"client_name": "bedplate on laptop"})).json()
        await operator.goto(begun["page"])
        await operator.get_by_role("button", name="Look at it").click()
        await expect(operator.get_by_text("bedplate on laptop")).to_be_visible()
        assert await serious(operator) == []
        await operator.get_by_role("button", name="Approve").click()
        await expect(operator.get_by_role("status")).to_contain_text("let in")
        polled = (await program.post("/v1/logins/poll", json={"secret": begun["secret"]})).json()
    assert polled["token"]["secret"].startswith("bpt_")
    await operator.goto("/device?code=BBBB-BBBB")
    await operator.get_by_role("button", name="Look at it").click()
    await expect(operator.get_by_role("alert")).to_contain_text("login.not_found")
