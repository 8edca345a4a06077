"""`bedplate incident`."""

from __future__ import annotations

from typing import Annotated

import typer

from controlplane.cli.noun import Limit, Noun, Output, Sort
from controlplane.cli.output import Format

noun = Noun(
    "incident",
    "incidents",
    in_project=False,
    columns={"ID": "id", "CODE": "code", "SUBJECT": "subject", "COUNT": "count", "LAST": "last_at", "DETAIL": "detail"},
    wide={"STATE": "state", "PROGRAM": "program", "STEP": "step", "RUN": "run_id"},
    help="What needs a person.",
)
app = noun.app
noun.add_show()


@app.command("list")
def list_(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Resolved ones too.")] = False,
    sort: Sort = "-last_at",
    limit: Limit = None,
    output: Output = Format.TABLE,
) -> None:
    """List open incidents."""
    noun.print_list(output, limit=limit, sort=sort, state=None if everything else "open")


@app.command()
def resolve(
    incident: str,
    resume: Annotated[bool, typer.Option("--resume/--no-resume", help="Let the parked run try again.")] = True,
    output: Output = Format.TABLE,
) -> None:
    """Close an incident; its run tries again."""
    noun.act(incident, "resolve", {"resume": resume}, output=output)
