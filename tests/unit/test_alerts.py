"""Alert rules: every one names a command that exists and only looks, and asks for metrics that are told of."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from controlplane.cli.main import app, mount

ROOT = Path(__file__).resolve().parents[2]
RULES = [
    pytest.param(rule, id=rule["alert"])
    for path in sorted((ROOT / "provisioning/observability/rules").glob("*.yml"))
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
]
ALONE = {"up", "usage"}
LOOKS = {"explain", "list", "show"}


@pytest.mark.parametrize("rule", RULES)
def test_an_alert_ends_in_a_command_that_only_looks(rule: dict[str, Any]) -> None:
    words = shlex.split(re.sub(r"\{\{.*?\}\}", "SOMETHING", rule["annotations"]["command"]))
    assert words[0] == "bedplate"
    mount([])
    command: Any = typer.main.get_command(app)
    for word in words[1:3]:
        command = command.get_command(None, word)
        assert command is not None, word
    if words[1] in ALONE or words[2] in LOOKS:
        return
    assert words[-1] == "--dry-run"
    assert "--dry-run" in {option for parameter in command.params for option in parameter.opts}


@pytest.mark.parametrize("rule", RULES)
def test_an_alert_asks_for_metrics_that_are_told_of(rule: dict[str, Any]) -> None:
    told = (ROOT / "docs/operations/metrics.md").read_text()
    missing = {name for name in re.findall(r"bedplate_[a-z_]+?(?=_bucket\b|\b)", rule["expr"]) if name not in told}
    assert not missing
