"""The host commands of the command line, against an API that listens and a real lab host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
import uvicorn

from controlplane.api import server
from controlplane.listener import bind
from provisioning.lab import LabHost
from tests.system.enrolling import Deployment, fingerprint

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.caps("root", "netns", "sshd"), pytest.mark.timeout(300)]


@contextlib.asynccontextmanager
async def listening(deployment: Deployment) -> AsyncIterator[dict[str, str]]:
    """The API on a port of its own; yields the environment of its command line."""
    listener = bind("127.0.0.1:0")
    config = uvicorn.Config(deployment.app, log_config=None, timeout_graceful_shutdown=2)
    serving = server.Server(config)
    serving.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    task = asyncio.create_task(serving.serve(sockets=[listener]))
    token = deployment.client.headers["authorization"].removeprefix("Bearer ")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield {**os.environ, "BEDPLATE_URL": url, "BEDPLATE_TOKEN": token}
    finally:
        serving.should_exit = True
        await asyncio.wait_for(task, 20)


async def test_the_command_line_from_key_to_removal(deployment: Deployment, host: LabHost) -> None:
    async with listening(deployment) as environment:

        async def bedplate(*words: str) -> subprocess.CompletedProcess[str]:
            argv = [sys.executable, "-m", "controlplane.cli.main", "host", *words]
            return await asyncio.to_thread(
                subprocess.run, argv, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL, timeout=120
            )

        place = f"root@{host.address}"
        host.authorize((await bedplate("bootstrap-key")).stdout)
        looked = await bedplate("preflight", place)
        assert looked.returncode == 0, looked.stdout + looked.stderr
        assert fingerprint(host) in looked.stdout
        assert json.loads((await bedplate("preflight", place, "--json")).stdout)["report"]["is_fit"] is True
        planned = await bedplate("add", place, "--dry-run", "-o", "json")
        changes = {(change["kind"], change["subject"]) for change in json.loads(planned.stdout)["changes"]}
        asked = await bedplate("add", place, "--name", "h", "--yes")
        assert asked.returncode == 2
        assert fingerprint(host) in asked.stderr
        words = ("--host-key-fingerprint", fingerprint(host), "--labels", "rack=1", "--location", "here", "-o", "json")
        added = await bedplate("add", place, "--name", "h", *words)
        assert added.returncode == 0, added.stderr
        assert {(change["kind"], change["subject"]) for change in json.loads(added.stdout)["changes"]} == changes
        assert json.loads((await bedplate("drain", "h", "-o", "json")).stdout)["is_cordoned"] is True
        assert json.loads((await bedplate("undrain", "h", "-o", "json")).stdout)["is_cordoned"] is False
        assert "h" in (await bedplate("list")).stdout
        refused = await bedplate("reboot", "h", "--yes")
        assert "reboot this host by hand" in refused.stderr, refused.stderr
        assert (await bedplate("add", f"{place}:1", "--name", "x", "--host-key-fingerprint", fingerprint(host))).returncode == 1
        assert (await bedplate("remove", "x", "--yes", "--forget")).returncode == 0
        removed = await bedplate("remove", "h", "--yes")
        assert removed.returncode == 0, removed.stderr
        assert (await bedplate("show", "h")).returncode == 3
