"""The table of processes of `bedplate up`: each once, and the same that docker-compose.yml names."""

from __future__ import annotations

from pathlib import Path

import yaml

from controlplane.embedded.services import Deployment
from controlplane.embedded.state import StateDirectory
from controlplane.settings import AcmeSettings, CertificateSettings, Settings, WorkerSettings

ROOT = Path(__file__).resolve().parents[2]


def _programs(tmp_path: Path, processes: int) -> list[str]:
    settings = Settings(state_dir=tmp_path, worker=WorkerSettings(processes=processes))
    return [service.name for service in Deployment(settings=settings, state=StateDirectory(path=tmp_path)).programs()]


def test_each_runs_once_and_is_what_compose_runs(tmp_path: Path) -> None:
    names = _programs(tmp_path, 1)
    assert len(names) == len(set(names)), "two watches would take each other's socket"
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    ours = {name for name, service in services.items() if service["image"].startswith("bedplate:")}
    assert set(names) == ours - {"migrate"}


def test_workers_as_many_as_asked(tmp_path: Path) -> None:
    names = _programs(tmp_path, 3)
    assert [name for name in names if name.startswith("worker")] == ["worker1", "worker2", "worker3"]
    assert len(names) == len(set(names))


def test_with_a_certificate_by_acme_both_are_reached_by_tls(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path, tls=CertificateSettings(acme=AcmeSettings(domains=("api.test",))))
    deployment = Deployment(settings=settings, state=StateDirectory(path=tmp_path))
    assert (deployment.api_url, deployment.gateway_url) == ("https://127.0.0.1:8700", "https://127.0.0.1:8800")
