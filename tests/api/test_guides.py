"""The commands of guides, as they stand there, in their order, against a real API: none is refused."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from controlplane.core.ids import Kind, new_id
from tests.api.fleet import add_host, lay_ground
from tests.api.test_cli import api, bedplate, home, server_url

__all__ = ["api", "bedplate", "home", "server_url"]

GUIDES = Path(__file__).resolve().parents[2] / "docs/guides"
_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
ENDPOINT = """INSERT INTO endpoint (id, project_id, name, model, spec, replicas, vcpus, memory_bytes)
SELECT :id, id, 'chat', 'm', '{}', 1, 1, 1 << 30 FROM project WHERE name = 'ours'"""


def commands(guide: str) -> list[list[str]]:
    blocks = _BLOCK.findall((GUIDES / guide).read_text())
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("bedplate ")]


def test_firewalls_addresses_and_load_balancers(api, bedplate, monkeypatch):
    """Machines and an endpoint are there; nothing is waited for, as no worker runs."""
    monkeypatch.setenv("BEDPLATE_PROJECT", "ours")
    assert bedplate("project", "create", "ours").code == 0
    api.execute(lambda _: lay_ground(api.database.sessionmaker))
    api.execute(lambda _: add_host(api.database.sessionmaker, cpus=8))
    for name in ("default", "front"):
        assert bedplate("network", "create", name).code == 0
    for name in ("web-1", "web-2", "web-3", "db-1"):
        assert bedplate("vm", "create", name, "--image", "debian", "--network", "default", "--no-wait").code == 0
    assert bedplate("firewall", "create", "monitoring", "--no-wait").code == 0
    api.sql(ENDPOINT, id=new_id(Kind.ENDPOINT))

    asked = commands("loadbalancer.md")
    assert len(asked) > 20
    for words in asked:
        rule = next((word for word in words if word.startswith("fwr_")), None)
        if rule is not None:
            shown = json.loads(bedplate("firewall", "show", words[2], "-o", "json").out)
            words[words.index(rule)] = shown["rules"][0]["id"]
        ran = bedplate(*words, "--no-wait")
        if "no such option" in ran.err.lower():
            ran = bedplate(*words)
        assert ran.code == 0, f"bedplate {shlex.join(words)}: {ran.err}"
    assert [one["name"] for one in bedplate("lb", "list", "-o", "json").json()] == ["web", "inside", "chat"]
