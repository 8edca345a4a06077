"""`bedplate image|network|vm|placement` against a real API with a fleet behind it: what is printed, how it ends."""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn

from controlplane.api.app import create_app
from controlplane.authz.service import Role
from controlplane.cli import main as cli
from controlplane.identity.service import new_token
from controlplane.listener import bind
from tests.programs.fleet import KEY, Fleet, open_fleet


@dataclass
class Ran:
    code: int
    out: str
    err: str

    def json(self):
        assert self.code == 0, self.err
        return json.loads(self.out)


Bedplate = Callable[..., Awaitable[Ran]]


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with open_fleet(database_url, tmp_path) as fleet:
        await fleet.add_host("a", cpus=4)
        async with fleet.running():
            yield fleet


@pytest.fixture
async def bedplate(fleet: Fleet, monkeypatch, capsys, tmp_path) -> AsyncIterator[Bedplate]:
    token = new_token(name="operator", role=Role.OPERATOR)
    async with fleet.database.session() as session:
        session.add(token.row)
    app = create_app(fleet.world.settings, fleet.database, sealer=fleet.world.sealer)
    listener = bind("127.0.0.1:0")
    one = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=2))
    serving = asyncio.create_task(one._serve(sockets=[listener]))
    for name in [name for name in os.environ if name.startswith("BEDPLATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("BEDPLATE_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setenv("BEDPLATE_TOKEN", token.secret)
    monkeypatch.setenv("BEDPLATE_PROJECT", "ours")

    def in_thread(arguments: tuple[str, ...]) -> Ran:
        monkeypatch.setattr(sys, "argv", ["bedplate", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    async def run(*arguments: str) -> Ran:
        return await asyncio.to_thread(in_thread, arguments)

    yield run
    one.should_exit = True
    await serving


async def test_life_of_a_vm(bedplate: Bedplate, fleet: Fleet) -> None:
    create = ("vm", "create", "web", "--image", "debian", "--network", "net", "--memory", "256M", "--ssh-key", KEY)
    made = (await bedplate(*create, "--label", "team=a", "-o", "json")).json()
    assert (made["status"], made["wanted"]["memory_bytes"], made["labels"]) == ("running", 256 << 20, {"team": "a"})
    listed = await bedplate("vm", "list")
    assert listed.out.split()[:3] == ["NAME", "STATUS", "IPV4"]
    assert "10.192.0.2" in listed.out
    assert (await bedplate("vm", "stop", "web", "-o", "json")).json()["status"] == "stopped"
    grown = (await bedplate("vm", "resize", "web", "--cpus", "2", "-o", "json")).json()
    assert grown["wanted"]["vcpus"] == grown["observed"]["vcpus"] == 2
    assert (await bedplate("vm", "start", "web", "-o", "json")).json()["status"] == "running"
    assert (await bedplate("vm", "restart", "web", "-o", "json")).json()["wanted"]["restart_generation"] == 1
    assert (await bedplate("vm", "update", "web", "--protect", "-o", "json")).json()["is_protected"] is True
    refused = await bedplate("vm", "delete", "web", "--yes")
    assert (refused.code, "vm.protected" in refused.err or "protected" in refused.err) == (5, True)
    await bedplate("vm", "update", "web", "--unprotect")
    assert (await bedplate("vm", "delete", "web", "--yes")).code == 0
    assert (await bedplate("vm", "show", "web")).code == 3
    assert await fleet.on_hosts() == []


async def test_refusals_have_their_exit_codes(bedplate: Bedplate) -> None:
    base = ("vm", "create", "web", "--image", "debian", "--network", "net")
    full = await bedplate(*base, "--cpus", "5")
    assert full.code == 6
    assert "without 5 free cores" in full.err
    assert (await bedplate("vm", "create", "Web", "--image", "debian", "--network", "net")).code == 2
    assert (await bedplate(*base, "--memory", "lots")).code == 2
    unknown = await bedplate("vm", "create", "web", "--image", "nothing", "--network", "net")
    assert (unknown.code, "nothing" in unknown.err) == (2, True)
    assert (await bedplate("vm", "stop", "nobody")).code == 3
    assert (await bedplate("vm", "list", "-o", "name")).out == ""


async def test_placement_is_explained(bedplate: Bedplate) -> None:
    fits = await bedplate("placement", "explain", "--cpus", "2", "--memory", "1G")
    assert (fits.code, "1 of 1 hosts could take it" in fits.err) == (0, True)
    full = (await bedplate("placement", "explain", "--cpus", "64", "-o", "json")).json()
    assert (full["fitting"], full["verdicts"][0]["rejected_by"]) == (0, ["vcpus"])


async def test_networks_and_images(bedplate: Bedplate, fleet: Fleet, tmp_path: Path) -> None:
    made = (await bedplate("network", "create", "back", "--cidr", "10.200.0.0/24", "-o", "json")).json()
    assert made["ipv4_cidr"] == "10.200.0.0/24"
    assert (await bedplate("network", "list", "-o", "name")).out.split() == ["net", "back"]
    assert (await bedplate("network", "delete", "back", "--yes")).code == 0
    directory = fleet.root / "image"
    (directory / "root.raw").write_bytes(b"other root" * 1000)
    mismatch = await bedplate("image", "import", str(directory), "--name", "mine")
    assert mismatch.code == 0, mismatch.err  # every digest of the manifest is stored already, so nothing is sent
    assert "available" in mismatch.out
    assert (await bedplate("image", "list", "-o", "name")).out.split() == ["debian", "mine"]
    gone = await bedplate("image", "remove", "mine", "--yes")
    assert gone.code == 0, gone.err
    assert (await bedplate("image", "import", str(tmp_path / "nowhere"))).code == 2
