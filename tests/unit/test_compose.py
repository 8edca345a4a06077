"""docker-compose.yml says nothing that the code does not know: modules, variables, ports, paths of health checks."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from controlplane.embedded import reference
from controlplane.settings import OTHER_VARIABLES, Settings

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if service["image"].startswith("bedplate:")}


def _runs(command: list[str]) -> bool:
    """Whether `python -m MODULE …` finds something to run."""
    assert command[:2] == ["python", "-m"], command
    spec = importlib.util.find_spec(command[2])
    if spec is not None and spec.submodule_search_locations is not None:
        return importlib.util.find_spec(f"{command[2]}.__main__") is not None
    return spec is not None


def test_all_processes_are_there() -> None:
    wanted = {"postgres", "redis", "migrate", "api", "worker", "watch", "beat", "gateway", "prometheus", "grafana"}
    assert set(SERVICES) == wanted


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_command_is_a_program_of_ours(name: str) -> None:
    assert _runs(OURS[name]["command"])


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_variable_is_a_setting(name: str) -> None:
    known = {variable for variable, _, _ in reference.variables()} | OTHER_VARIABLES
    assert set(OURS[name]["environment"]) - known == set()


@pytest.mark.parametrize("name", sorted(OURS))
def test_no_secret_is_in_the_environment(name: str) -> None:
    assert not [value for value in OURS[name]["environment"].values() if "@" in value or "password" in value.lower()]


@pytest.mark.parametrize("name", ["api", "gateway"])
def test_listener_port_and_health_check_agree(name: str) -> None:
    default = getattr(Settings.model_fields[name].default, "listen").rpartition(":")[2]  # noqa: B009
    service = OURS[name]
    assert service["environment"][f"BEDPLATE_{name.upper()}__LISTEN"] == f"0.0.0.0:{default}"
    assert service["ports"] == [f"127.0.0.1:{default}:{default}"]
    probe = service["healthcheck"]["test"]
    assert probe[0] == "CMD"
    assert _runs(probe[1:4])
    assert probe[4].startswith(f"http://127.0.0.1:{default}/")
    assert probe[4].rpartition("/")[2] in {"healthz", "readyz"}


def test_what_is_mounted_exists_and_volumes_are_declared() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], volume
        assert set(service.get("secrets", [])) <= set(COMPOSE["secrets"])


def test_prometheus_scrapes_our_listeners() -> None:
    scrape = yaml.safe_load((ROOT / "provisioning/observability/prometheus.yml").read_text())["scrape_configs"]
    targets = {target for job in scrape for group in job.get("static_configs", []) for target in group["targets"]}
    assert targets == {"api:8700", "gateway:8800"}
    for name in ("api", "worker", "watch"):
        assert "state:/var/lib/bedplate" in OURS[name]["volumes"], "the API shows their metrics through the state directory"


def test_the_image_has_the_version_and_all_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {service["image"] for service in OURS.values()} == {f"bedplate:{project['project']['version']}"}
    dockerfile = (ROOT / "Dockerfile").read_text()
    for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]:
        assert f"COPY {pattern.rstrip('*')} " in dockerfile
