"""/metrics of the API: its own, and those of the processes beside it."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from controlplane.kernel import exposition
from controlplane.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
NAMED = {  # with the labels that each must have
    "bedplate_run_steps": {"program", "step", "outcome"},
    "bedplate_run_step_seconds": set(),
    "bedplate_runs_overdue": set(),
    "bedplate_lease_lost": set(),
    "bedplate_deadline_missed": set(),
    "bedplate_host_up": {"host"},
    "bedplate_host_verb_seconds": {"verb", "result"},
    "bedplate_placement_rejections": {"filter"},
}
OTHER = """
import sys
from pathlib import Path
from controlplane.kernel import exposition, metrics
from controlplane.placement.explain import REJECTIONS
from controlplane.remote import ssh
from controlplane.watch.host import HOST_UP
metrics.STEPS.labels("vm", "place", "goto").inc(3)
HOST_UP.labels("host_1").set(1)
REJECTIONS.labels("memory").inc()
ssh.VERB_SECONDS.labels("vm.ensure", "ok").observe(0.2)
with exposition.shown(Path(sys.argv[1]), "worker"):
    print("shown", flush=True)
    sys.stdin.read()
"""


async def _families(client: httpx2.AsyncClient):
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(answer.text)}, answer.text


async def test_what_workers_and_watches_count_is_shown(anonymous: httpx2.AsyncClient, settings: Settings) -> None:
    argv = [sys.executable, "-c", OTHER, str(settings.state_dir)]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "shown\n"
            families, text = await _families(anonymous)
            for name, labels in NAMED.items():
                assert name in families, name
                assert all(labels <= sample.labels.keys() for sample in families[name].samples), name
            process = f"worker-{socket.gethostname()[:16]}-{other.pid}"
            steps = {"program": "vm", "step": "place", "outcome": "goto", "process": process}
            assert [(sample.labels, sample.value) for sample in families["bedplate_run_steps"].samples] == [(steps, 3.0)]
            assert text.count("# TYPE bedplate_placement_rejections_total ") == 1
            assert 'bedplate_host_up{host="host_1",process=' in text
            other.kill()
            other.wait()
        finally:
            other.kill()
    families, _ = await _families(anonymous)
    assert "bedplate_run_steps" not in families
    assert "bedplate_api_requests" in families
    assert list((settings.state_dir / "metrics").iterdir()) == [], "the socket of the dead is removed"


def test_a_place_where_no_socket_can_be_is_worked_without(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    with exposition.shown(long, "worker"):
        assert not list(long.rglob("worker*"))
