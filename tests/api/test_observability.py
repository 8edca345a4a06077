"""Alert rules and dashboards: every query asks for what the real /metrics show."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from controlplane.api.certificate import CertificateKeeper
from controlplane.gateway.metrics import Metrics
from tests.agent.conftest import DEADLINE_SECONDS, served

__all__ = ["served"]

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "provisioning/observability"
RULES = HERE / "rules/bedplate.yml"
DASHBOARDS = sorted((HERE / "grafana/dashboards").glob("*.json"))
TOUCH = """
def touch(registry):
    for one in set(registry._collector_to_names):
        if getattr(one, "_labelnames", ()):
            one.labels(*["x"] * len(one._labelnames))
"""
OTHER = f"""
import sys
from pathlib import Path
import prometheus_client
from controlplane.kernel import exposition, metrics
from controlplane.placement import explain
from controlplane.remote import ssh
from controlplane.resources.endpoint import reconcile
from controlplane.watch import host, main
{TOUCH}
touch(prometheus_client.REGISTRY)
explain.REJECTIONS.labels("memory")
with exposition.shown(Path(sys.argv[1]), "worker"):
    print("shown", flush=True)
    sys.stdin.read()
"""
WORDS = {"le", "job", "instance"}  # of Prometheus itself


def alerts() -> list[dict]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def queries() -> Iterator[str]:
    yield from (rule["expr"] for rule in alerts())
    for path in DASHBOARDS:
        yield from (target["expr"] for panel in json.loads(path.read_text())["panels"] for target in panel["targets"])


def _labels(text: str) -> dict[str, set[str]]:
    """The labels by sample name, of every family that an exposition declares; None of one without samples."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        ends = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(family.type, ("",))
        for end in ends:
            found.setdefault(family.name + end, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def _gateway() -> str:
    metrics, scope = Metrics(), {}
    exec(TOUCH, scope)
    scope["touch"](metrics.registry)
    return metrics.render().decode()


async def _agent(served) -> str:
    reader, writer = await asyncio.open_unix_connection(served.paths.metrics_socket)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(DEADLINE_SECONDS):
        body = (await reader.read()).decode()
    writer.close()
    return body.partition("\r\n\r\n")[2]


async def test_every_query_asks_for_what_is_there(api, anonymous, settings, served):
    CertificateKeeper(settings=settings, database=api.database, registry=api.app.state.registry)
    argv = [sys.executable, "-c", OTHER, str(settings.state_dir)]
    pipe = subprocess.PIPE
    await anonymous.get("/healthz")
    with subprocess.Popen(argv, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as other:
        try:
            assert other.stdout.readline() == "shown\n"
            api = (await anonymous.get("/metrics")).text
        finally:
            other.kill()
    found = {**_labels(api), **_labels(_gateway()), **_labels(await _agent(served))}
    asked = list(queries())
    assert len(asked) > 50
    for query in asked:
        names = re.findall(r"bedplate_\w+", query)
        assert names or "up{" in query, query
        assert [name for name in names if name not in found] == [], query
        told = set().union(*(found[name] for name in names)) if names else set()
        selected = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query))
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
        of_agents = all(name.startswith(("bedplate_lb_", "bedplate_agent_")) for name in names)
        if not of_agents or told:  # a host without a load balancer shows the names alone
            assert selected | grouped <= told | WORDS, query


@pytest.mark.caps("promtool")
def test_promtool_finds_the_rules_right_and_they_fire_when_they_should():
    promtool = shutil.which("promtool")
    every = [str(path) for path in sorted(RULES.parent.glob("*.yml"))]
    for arguments in (["check", "rules", *every], ["test", "rules", str(ROOT / "tests/unit/alerts.yaml")]):
        done = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
