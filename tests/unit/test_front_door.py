"""The script at the root: plain POSIX sh, pins for everything it installs, CI runs what the README says."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_script_is_posix_sh() -> None:
    script = ROOT / "bedplate"
    assert script.read_text().startswith("#!/bin/sh\n")
    assert script.stat().st_mode & 0o111
    dash = shutil.which("dash")
    if dash is None:
        pytest.skip("dash is not installed")
    subprocess.run([dash, "-n", str(script)], check=True)
    assert not re.search(r"\[\[|\blocal \b|<<<|\bfunction \b|&>|\$'", script.read_text())


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert (ROOT / ".ci/run").read_text().rstrip().endswith("exec ./bedplate test")
    assert "\n./bedplate test\n" in (ROOT / "README.md").read_text()


def test_every_dependency_is_pinned_without_an_address() -> None:
    pins = (ROOT / "constraints.txt").read_text()
    assert "://" not in pins
    names = {line.split("==")[0].lower() for line in pins.splitlines()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = {re.split(r"[\[><=! ]", entry)[0].lower() for group in groups for entry in group}
    assert wanted - names == set()


def test_no_pin_is_outside_its_range() -> None:
    from packaging.requirements import Requirement

    pins = dict(line.split(" ;")[0].split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    outside = [
        entry
        for group in groups
        for entry in group
        if (wanted := Requirement(entry)) and not wanted.specifier.contains(pins[wanted.name.lower()])
    ]
    assert outside == []
