"""`bedplate placement`."""

from __future__ import annotations

from typing import Annotated

import typer

from controlplane.cli import spec
from controlplane.cli.noun import File, Output
from controlplane.cli.output import Format, say, show_many, show_one
from controlplane.cli.size import parse_bytes

app = typer.Typer(rich_markup_mode=None, name="placement", no_args_is_help=True, help="Where machines fit.")


@app.callback()
def placement() -> None:
    """Where machines fit."""


@app.command()
def explain(
    vcpus: Annotated[int | None, typer.Option("--vcpus", "--cpus", min=1, help="Virtual cores.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory, like 2G.")] = None,
    location: Annotated[str | None, typer.Option(help="Only hosts at this location.")] = None,
    host_label: Annotated[list[str] | None, typer.Option(help="Only hosts with this label, KEY=VALUE.")] = None,
    isolation: Annotated[str | None, typer.Option(help="vm or container.")] = None,
    architecture: Annotated[str | None, typer.Option(help="x86_64 or aarch64.")] = None,
    file: File = None,
    output: Output = Format.TABLE,
) -> None:
    """Say where a machine would fit now, and what runs short where it would not. Nothing is made."""
    from controlplane.cli.client import Client

    options = {
        "vcpus": vcpus,
        "memory_bytes": parse_bytes(memory, "--memory"),
        "location": location,
        "host_labels": spec.pairs(host_label, "--host-label"),
        "isolation": isolation,
        "architecture": architecture,
    }
    answer = Client().post("/v1/placements/explain", spec.merged(file, options))
    if output in (Format.JSON, Format.YAML):
        show_one(answer, output)
        return
    say(answer["detail"])
    columns = {"HOST": "name", "REJECTED BY": "rejected_by", "FREE CPUS": "free_vcpus", "FREE MEMORY": "free_memory_bytes"}
    show_many(answer["verdicts"], output, columns, {"ID": "host_id", "SCORE": "score"})
