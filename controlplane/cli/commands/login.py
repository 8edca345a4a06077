"""`bedplate login`: put a token into a context. The one rule: a token is typed, piped or asked for, never an argument."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from controlplane.cli.client import Client

app = typer.Typer(rich_markup_mode=None)


@app.command()
def login(
    url: Annotated[str, typer.Argument(help="Address of the API, like https://bedplate.example:8700.")],
    name: Annotated[str, typer.Option(help="Name of the context.")] = "default",
    project: Annotated[str | None, typer.Option("--project", "-p", help="Project to work in.")] = None,
    ca: Annotated[str, typer.Option(help="PEM file of the authority to trust.")] = "",
    device: Annotated[
        bool | None, typer.Option("--device/--token", help="Ask a browser, or take a token that is typed or piped.")
    ] = None,
) -> None:
    """Sign in: shows a code to approve in the console (or takes a token from a pipe), tries the token, keeps it."""
    from pathlib import Path

    from controlplane.cli import context
    from controlplane.cli.client import Client, segment
    from controlplane.cli.output import say

    trusted = str(Path(ca).expanduser().absolute()) if ca else ""
    place = context.Context(name=name, url=url.rstrip("/"), ca=trusted)
    is_asked = sys.stdin.isatty() if device is None else device
    token = _approved(Client(place)) if is_asked else _token()
    chosen = context.Context(name=name, url=place.url, token=token, ca=trusted)
    client = Client(chosen)
    me = client.get("/v1/tokens/current")
    wanted = project or me["project_id"] or (_only_project(client) if me["user_id"] else None)
    called = client.get(f"/v1/projects/{segment(wanted)}")["name"] if wanted else ""
    contexts = context.load()
    contexts.put(context.Context(name=name, url=chosen.url, token=chosen.token, ca=trusted, project=called))
    contexts.save()
    say(f"signed in to {chosen.url} as {me['role']} {me['name']}" + (f", project {called}" if called else ""))


def _approved(client: Client) -> str:
    """The token that a person gives in the console (RFC 8628). Raises CommandFailed when they do not, or not in time."""
    import platform
    import re
    import time

    from controlplane.cli.client import refuse_plain
    from controlplane.cli.errors import CommandFailed, Exit
    from controlplane.cli.output import say

    refuse_plain(client.context.url)
    machine = re.sub(r"[^A-Za-z0-9._-]", "-", platform.node())[:40] or "somewhere"
    begun = client.post("/v1/logins", {"client_name": f"bedplate on {machine}"})
    print(f"Open {client.context.url}{begun['page']}", flush=True)
    print(f"and approve the code {begun['user_code']}", flush=True)
    say("waiting for the console; Ctrl-C leaves")
    while True:
        time.sleep(begun["interval_seconds"])
        try:
            answer = client.post("/v1/logins/poll", {"secret": begun["secret"]})
        except CommandFailed as failed:
            if failed.code == "login.ended":
                raise CommandFailed(
                    "nobody approved the code in time", hint="bedplate login again", exit_code=Exit.TIMED_OUT, code=failed.code
                ) from failed
            if failed.code != "login.too_soon":
                raise
        else:
            if answer["state"] == "approved":
                return str(answer["token"]["secret"])


def _only_project(client: Client) -> str | None:
    """The one that the person is a member of, when it is one."""
    found = client.get("/v1/users/current")["memberships"]
    return str(found[0]["project"]) if len(found) == 1 else None


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
