"""`bedplate member`."""

from __future__ import annotations

from typing import Annotated

import typer

from controlplane.cli.noun import InProject, Noun, Output
from controlplane.cli.output import Format

noun = Noun(
    "member",
    "members",
    columns={"NAME": "user_name", "ROLE": "role", "AGE": "created_at"},
    wide={"ID": "id", "PERSON": "user_id"},
    help="Who has which role in a project.",
)
app = noun.app
noun.add_list()
noun.add_show()
noun.add_delete("remove")

Role = Annotated[str, typer.Argument(help="viewer, editor or admin.")]


@app.command()
def add(user: str, role: Role = "viewer", project: InProject = None, output: Output = Format.TABLE) -> None:
    """Give a person a role."""
    noun.create({"user": user, "role": role}, project=project, output=output)


@app.command("set")
def set_(user: str, role: Role, project: InProject = None, output: Output = Format.TABLE) -> None:
    """Change a person's role."""
    noun.act(user, body={"role": role}, project=project, output=output)
