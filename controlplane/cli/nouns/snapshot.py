"""`bedplate snapshot`."""

from __future__ import annotations

from typing import Annotated

import typer

from controlplane.cli import spec
from controlplane.cli.noun import File, InProject, LabelOptions, Noun, Output, Timeout, Waiting
from controlplane.cli.output import Format

noun = Noun(
    "snapshot",
    "snapshots",
    columns={"NAME": "name", "STATUS": "status", "VOLUME": "volume", "SIZE": "size_bytes", "TAKEN": "observed.taken_at"},
    wide={"ID": "id", "HOST": "observed.host", "CONSISTENCY": "observed.consistency", "LABELS": "labels"},
    help="Snapshots of volumes.",
)
app = noun.app
noun.add_list()
noun.add_show()
noun.add_delete()


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="A DNS label.")] = None,
    volume: Annotated[str | None, typer.Option(help="Name or id of the volume.")] = None,
    protect: Annotated[bool | None, typer.Option("--protect", help="Refuse deletion until unprotected.")] = None,
    label: LabelOptions = None,
    file: File = None,
    project: InProject = None,
    output: Output = Format.TABLE,
    wait: Waiting = True,
    timeout: Timeout = "30m",
) -> None:
    """Take a snapshot of a volume; its machine goes on running."""
    options = {"name": name, "volume": volume, "is_protected": protect, "labels": spec.pairs(label)}
    noun.create(spec.merged(file, options), project=project, output=output, wait=wait, timeout=timeout)
