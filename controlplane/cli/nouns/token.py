"""`bedplate token`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from controlplane.cli import spec
from controlplane.cli.noun import File, Noun, Output
from controlplane.cli.output import Format, say, show_one

noun = Noun(
    "token",
    "tokens",
    in_project=False,
    columns={"NAME": "name", "ROLE": "role", "HINT": "hint", "EXPIRES": "expires_at", "USED": "last_used_at"},
    wide={
        "ID": "id",
        "PROJECT": "project_id",
        "PERSON": "user_id",
        "MADE BY": "maker_id",
        "SCOPES": "scopes",
        "AGE": "created_at",
    },
    help="Bearer tokens of operators, of projects and of people.",
)
app = noun.app
noun.add_list()
noun.add_show()
noun.add_delete("revoke")


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="A DNS label.")] = None,
    role: Annotated[str | None, typer.Option(help="operator, user (yourself), or in a project admin, editor, viewer.")] = None,
    project: Annotated[str | None, typer.Option("--project", "-p", help="The project of a project role.")] = None,
    scope: Annotated[list[str] | None, typer.Option(help="Only these actions, like vm.* or *.list; may be repeated.")] = None,
    expires: Annotated[str | None, typer.Option(help="Refused after this time, like 12h or 90m.")] = None,
    file: File = None,
    output: Output = Format.TABLE,
) -> None:
    """Make a token. It is printed this once."""
    from controlplane.cli.client import Client
    from controlplane.cli.wait import seconds_of

    expires_at = None if expires is None else (datetime.now(UTC) + timedelta(seconds=seconds_of(expires))).isoformat()
    options = {"name": name, "role": role, "project": project, "scopes": scope or None, "expires_at": expires_at}
    made = Client().post("/v1/tokens", spec.merged(file, options))
    if output in {Format.TABLE, Format.WIDE}:
        say(f"token {made['name']}, shown this once:")
        print(made["secret"])
    else:
        show_one(made, output)


@app.command()
def current(output: Output = Format.TABLE) -> None:
    """Show whose token is in use."""
    from controlplane.cli.client import Client

    show_one(Client().get("/v1/tokens/current"), output)
