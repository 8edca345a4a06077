"""The names that people and programs rely on: commands, routes and the settings of the front door are all there."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from controlplane.cli import main, nouns

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = """
host preflight bootstrap-key add list show drain undrain reboot remove
image import list show remove
project create list use
token create list show revoke
network create list show delete
vm create list show start stop restart resize ssh console logs delete
model list show validate import
endpoint create list show scale update logs delete
route create list show set delete
key create list revoke
bench load limit regress
operation list show wait
event tail
incident list show resolve
placement explain
context list use set
cert init acme show
"""
ALONE = {"usage", "login", "version", "up", "demo", "test"}
ROUTES = """
GET POST /v1/hosts
GET DELETE /v1/hosts/{host}
POST /v1/hosts/preflight
POST /v1/hosts/{host}/drain
POST /v1/hosts/{host}/undrain
POST /v1/hosts/{host}/reboot
GET /v1/hosts/{host}/inventory
GET POST /v1/images
GET DELETE /v1/images/{image}
GET /v1/models
GET /v1/models/{model}
POST /v1/placements/explain
GET /v1/incidents
GET /v1/incidents/{incident}
POST /v1/incidents/{incident}/resolve
GET /v1/operations
GET /v1/operations/{operation}
GET /v1/events
GET POST /v1/tokens
GET DELETE /v1/tokens/{token}
GET POST /v1/projects
GET PATCH DELETE /v1/projects/{project}
GET POST /v1/projects/{project}/vms
GET PATCH DELETE /v1/projects/{project}/vms/{vm}
POST /v1/projects/{project}/vms/{vm}/start
POST /v1/projects/{project}/vms/{vm}/stop
POST /v1/projects/{project}/vms/{vm}/restart
POST /v1/projects/{project}/vms/{vm}/resize
GET /v1/projects/{project}/vms/{vm}/log
GET POST /v1/projects/{project}/networks
GET DELETE /v1/projects/{project}/networks/{network}
GET POST /v1/projects/{project}/endpoints
GET PATCH DELETE /v1/projects/{project}/endpoints/{endpoint}
GET POST /v1/projects/{project}/routes
GET PATCH DELETE /v1/projects/{project}/routes/{route}
GET POST /v1/projects/{project}/keys
GET DELETE /v1/projects/{project}/keys/{key}
GET /v1/projects/{project}/usage
GET /v1/projects/{project}/audit
"""


@cache
def _root() -> TyperGroup:
    main.mount([])
    command = typer.main.get_command(main.app)
    assert isinstance(command, TyperGroup)
    return command


def _noun(name: str) -> TyperGroup:
    command = _root().commands[name.replace("_", "-")]
    assert isinstance(command, TyperGroup)
    return command


@pytest.mark.parametrize("line", COMMANDS.split("\n")[1:-1], ids=lambda line: line.split()[0])
def test_a_noun_has_its_verbs(line: str) -> None:
    noun, *verbs = line.split()
    assert [verb for verb in verbs if verb not in _noun(noun).commands] == []


def test_commands_without_a_noun() -> None:
    assert ALONE - _root().commands.keys() == set()


def test_every_list_and_show_knows_all_forms() -> None:
    for module in pkgutil.iter_modules(nouns.__path__):
        for verb in {"list", "show"} & _noun(module.name).commands.keys():
            options = {flag for parameter in _noun(module.name).commands[verb].params for flag in parameter.opts}
            assert {"-o", "--output"} <= options, f"{module.name} {verb}"


def test_host_add_has_its_options() -> None:
    options = {flag for parameter in _noun("host").commands["add"].params for flag in parameter.opts}
    wanted = "--name --jump --identity --sudo --location --labels --artifact-dir --dry-run --host-key-fingerprint"
    assert set(wanted.split()) - options == set()


def test_every_route_is_in_the_document() -> None:
    paths = json.loads((ROOT / "docs/reference/openapi.json").read_text())["paths"]
    for line in ROUTES.split("\n")[1:-1]:
        *methods, path = line.split()
        assert {method.lower() for method in methods} - paths.get(path, {}).keys() == set(), line


def _every_command(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for part, inner in getattr(command, "commands", {}).items():
        yield from _every_command(inner, (*path, part))


def test_help_of_every_command_is_shown_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets and colons of examples are no markup."""
    alone = {("up",), ("demo",), ("test",)}  # these become other programs
    for path in set(_every_command(_root())) - alone:
        assert _root().main([*path, "--help"], prog_name="bedplate", standalone_mode=False) == 0, path
        shown = capsys.readouterr().out
        assert shown.startswith(f"Usage: {' '.join(('bedplate', *path))}"), path
        assert "\N{HUNDRED POINTS SYMBOL}" not in shown
