"""`bedplate login`: put a token into a context. The one rule: a token is typed or piped, never an argument."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

app = typer.Typer(rich_markup_mode=None)


@app.command()
def login(
    url: Annotated[str, typer.Argument(help="Address of the API, like https://bedplate.example:8700.")],
    name: Annotated[str, typer.Option(help="Name of the context.")] = "default",
    project: Annotated[str | None, typer.Option("--project", "-p", help="Project to work in.")] = None,
    ca: Annotated[str, typer.Option(help="PEM file of the authority to trust.")] = "",
) -> None:
    """Sign in: asks for a token (or reads it from a pipe), tries it, keeps it."""
    from pathlib import Path

    from controlplane.cli import context
    from controlplane.cli.client import Client, segment
    from controlplane.cli.output import say

    trusted = str(Path(ca).expanduser().absolute()) if ca else ""
    chosen = context.Context(name=name, url=url.rstrip("/"), token=_token(), ca=trusted)
    client = Client(chosen)
    me = client.get("/v1/tokens/current")
    wanted = project or me["project_id"]
    called = client.get(f"/v1/projects/{segment(wanted)}")["name"] if wanted else ""
    contexts = context.load()
    contexts.put(context.Context(name=name, url=chosen.url, token=chosen.token, ca=trusted, project=called))
    contexts.save()
    say(f"signed in to {chosen.url} as {me['role']} {me['name']}" + (f", project {called}" if called else ""))


def _token() -> str:
    from controlplane.cli.errors import CommandFailed, Exit

    if sys.stdin.isatty():
        import getpass

        token = getpass.getpass("Token: ")
    else:
        token = sys.stdin.readline()
    token = token.strip()
    if not token:
        raise CommandFailed("no token was given", hint="bedplate login URL < token-file", exit_code=Exit.USAGE)
    return token
