"""`bedplate route`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from controlplane.cli import spec
from controlplane.cli.errors import CommandFailed, Exit
from controlplane.cli.noun import File, InProject, Noun, Output
from controlplane.cli.output import Format

noun = Noun(
    "route",
    "routes",
    columns={"NAME": "name", "TARGETS": "targets", "AGE": "created_at"},
    wide={"ID": "id", "TIMEOUTS": "timeouts"},
    help="Model names that applications send, and the endpoints behind them.",
)
app = noun.app
noun.add_list()
noun.add_show()
noun.add_delete()

Targets = Annotated[list[str] | None, typer.Option("--target", help="ENDPOINT[:FALLBACK][=WEIGHT]; may be repeated.")]
Timeouts = Annotated[list[str] | None, typer.Option("--timeout", help="NAME=SECONDS: connect, first_token, idle, total.")]


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="The model name that applications send.")] = None,
    target: Targets = None,
    timeout: Timeouts = None,
    file: File = None,
    project: InProject = None,
    output: Output = Format.TABLE,
) -> None:
    """Give a model name to endpoints. A file with a list under `routes` makes all of them, or changes those that exist."""
    options = {"name": name, "targets": _targets(target), "timeouts": _seconds(timeout)}
    body = spec.merged(file, options)
    if "routes" in body:
        _set_all(body, project=project, output=output)
    else:
        noun.create(body, project=project, output=output, wait=False)


def _set_all(body: dict[str, Any], *, project: str | None, output: Format) -> None:
    routes = body["routes"]
    if set(body) != {"routes"} or not isinstance(routes, list) or not all(isinstance(route, dict) for route in routes):
        raise CommandFailed("`routes` must be a list of routes, and stand alone", exit_code=Exit.USAGE)
    from controlplane.cli.client import Client

    client = Client()
    found = {route["name"] for route in client.items(noun.path(client, project))}
    for route in routes:
        if route.get("name") in found:
            noun.act(
                route["name"],
                body={key: value for key, value in route.items() if key != "name"},
                project=project,
                output=output,
                wait=False,
            )
        else:
            noun.create(route, project=project, output=output, wait=False)


@app.command("set")
def set_(
    route: str,
    target: Targets = None,
    timeout: Timeouts = None,
    file: File = None,
    project: InProject = None,
    output: Output = Format.TABLE,
) -> None:
    """Change where a model name leads; in force within a second."""
    options = {"targets": _targets(target), "timeouts": _seconds(timeout)}
    noun.act(route, body=spec.merged(file, options), project=project, output=output, wait=False)


def _targets(given: list[str] | None) -> list[dict[str, Any]] | None:
    if not given:
        return None
    found: list[dict[str, Any]] = []
    for text in given:
        named, separator, weight = text.partition("=")
        if separator and not weight.isdigit():
            raise CommandFailed(f"--target {text}: the weight is no number", exit_code=Exit.USAGE)
        endpoint, _, fallback = named.partition(":")
        found.append({"endpoint": endpoint, "weight": int(weight) if separator else 1, "fallback": fallback or None})
    return found


def _seconds(given: list[str] | None) -> dict[str, float] | None:
    pairs = spec.pairs(given, "--timeout")
    if pairs is None:
        return None
    try:
        return {name: float(text) for name, text in pairs.items()}
    except ValueError as error:
        raise CommandFailed("--timeout wants NAME=SECONDS", why=str(error), exit_code=Exit.USAGE) from error
