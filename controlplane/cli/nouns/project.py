"""`bedplate project`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from controlplane.cli import context, spec
from controlplane.cli.errors import CommandFailed, Exit
from controlplane.cli.noun import File, LabelOptions, Noun, Output
from controlplane.cli.output import Format, say

noun = Noun(
    "project",
    "projects",
    in_project=False,
    columns={"NAME": "name", "ID": "id", "AGE": "created_at"},
    wide={"CONTAINERS": "allow_containers", "QUOTA": "quota", "DESCRIPTION": "description", "LABELS": "labels"},
    help="The walls between tenants.",
)
app = noun.app
noun.add_list()
noun.add_show()
noun.add_delete()

Description = Annotated[str | None, typer.Option(help="For people.")]
Containers = Annotated[
    bool | None, typer.Option("--allow-containers/--no-allow-containers", help="Whether workloads may run as containers.")
]


QuotaOptions = Annotated[
    list[str] | None,
    typer.Option("--quota", help="RESOURCE=N, of vms, vcpus, memory_bytes, volumes, disk_bytes; replaces the whole quota."),
]


def _quota(given: list[str] | None) -> dict[str, int] | None:
    found = spec.pairs(given, "--quota")
    if found is None:
        return None
    if wrong := [value for value in found.values() if not value.isdigit()]:
        raise CommandFailed(f"--quota takes whole numbers, not {wrong[0]!r}", exit_code=Exit.USAGE)
    return {name: int(value) for name, value in found.items()}


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="A DNS label.")] = None,
    description: Description = None,
    label: LabelOptions = None,
    allow_containers: Containers = None,
    quota: QuotaOptions = None,
    file: File = None,
    output: Output = Format.TABLE,
) -> None:
    """Make a project."""
    options = {
        "name": name,
        "description": description,
        "labels": spec.pairs(label),
        "allow_containers": allow_containers,
        "quota": _quota(quota),
    }
    noun.create(spec.merged(file, options), output=output)


@app.command()
def update(
    project: str,
    description: Description = None,
    label: LabelOptions = None,
    allow_containers: Containers = None,
    quota: QuotaOptions = None,
    file: File = None,
    output: Output = Format.TABLE,
) -> None:
    """Change what is given."""
    options = {
        "description": description,
        "labels": spec.pairs(label),
        "allow_containers": allow_containers,
        "quota": _quota(quota),
    }
    noun.act(project, body=spec.merged(file, options), output=output)


@app.command("rotate-key")
def rotate_key(project: str, output: Output = Format.TABLE) -> None:
    """Put a new key over the keys of all volumes of a project; no data moves, and the old key is gone."""
    noun.act(project, "rotate-key", output=output)


@app.command()
def use(project: str) -> None:
    """Work in this project from now on."""
    from controlplane.cli.client import Client, segment

    client = Client()
    name = client.get(f"/v1/projects/{segment(project)}")["name"]
    contexts = context.load()
    chosen = contexts.by_name.get(contexts.current)
    if chosen is None:
        chosen = context.Context(name="default", url=client.context.url, ca=client.context.ca)
    contexts.put(replace(chosen, project=name))
    contexts.save()
    say(f"now in project {name} of {chosen.url}")
