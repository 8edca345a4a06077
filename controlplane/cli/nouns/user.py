"""`bedplate user`."""

from __future__ import annotations

from typing import Annotated

import typer

from controlplane.cli import spec
from controlplane.cli.noun import File, Noun, Output
from controlplane.cli.output import Format, say, show_one

noun = Noun(
    "user",
    "users",
    in_project=False,
    columns={
        "NAME": "name",
        "DISPLAY": "display_name",
        "OPERATOR": "is_operator",
        "DISABLED": "is_disabled",
        "CODES": "has_totp",
    },
    wide={"ID": "id", "PASSWORD": "has_password", "LOCKED UNTIL": "locked_until", "AGE": "created_at"},
    help="People who sign in.",
)
app = noun.app
noun.add_list()
noun.add_show()
noun.add_delete()

Operator = Annotated[bool | None, typer.Option("--operator/--no-operator", help="May do everything in the deployment.")]
Display = Annotated[str | None, typer.Option(help="What people read.")]


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="What is typed at sign-in, like an address.")] = None,
    display_name: Display = None,
    operator: Operator = None,
    file: File = None,
    output: Output = Format.TABLE,
) -> None:
    """Make a person's account; prints the one-time link by which they set a password, this once."""
    from controlplane.cli.client import Client

    client = Client()
    options = {"name": name, "display_name": display_name, "is_operator": operator}
    _show_link(client.context.url, client.post("/v1/users", spec.merged(file, options)), output)


@app.command()
def update(
    user: str,
    display_name: Display = None,
    operator: Operator = None,
    disabled: Annotated[bool | None, typer.Option("--disable/--enable", help="Refuse the person everywhere.")] = None,
    output: Output = Format.TABLE,
) -> None:
    """Change what is given."""
    options = {"display_name": display_name, "is_operator": operator, "is_disabled": disabled}
    noun.act(user, body=spec.merged(None, options), output=output)


@app.command()
def invite(user: str, output: Output = Format.TABLE) -> None:
    """Make a new one-time link, for a lost password or authenticator."""
    from controlplane.cli.client import Client, segment

    client = Client()
    _show_link(client.context.url, client.post(f"/v1/users/{segment(user)}/invite", {}), output)


@app.command()
def current(output: Output = Format.TABLE) -> None:
    """Show who you are, and your roles."""
    from controlplane.cli.client import Client

    show_one(Client().get("/v1/users/current"), output)


def _show_link(url: str, made: dict[str, str], output: Format) -> None:
    if output in {Format.TABLE, Format.WIDE}:
        say(f"one-time link of {made['name']}, shown this once, until {made['link_expires_at']}:")
        print(f"{url}{made['link']}")
    else:
        show_one(made, output)
