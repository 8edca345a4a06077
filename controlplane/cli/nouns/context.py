"""`bedplate context`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from controlplane.cli import context
from controlplane.cli.errors import CommandFailed, Exit
from controlplane.cli.noun import Output
from controlplane.cli.output import Format, say, show_many

app = typer.Typer(rich_markup_mode=None, name="context", no_args_is_help=True, help="Which deployment commands speak to.")


@app.command("list")
def list_(output: Output = Format.TABLE) -> None:
    """List contexts; tokens are not shown."""
    contexts = context.load()
    rows = [
        {
            "current": "*" if item.name == contexts.current else "",
            "name": item.name,
            "url": item.url,
            "project": item.project,
            "ca": item.ca,
        }
        for item in contexts.by_name.values()
    ]
    show_many(rows, output, {"": "current", "NAME": "name", "URL": "url", "PROJECT": "project"}, {"CA": "ca"})


@app.command()
def use(name: str) -> None:
    """Speak to this deployment from now on."""
    contexts = context.load()
    if name not in contexts.by_name:
        raise CommandFailed(f"no context {name}", hint="bedplate context list", exit_code=Exit.NOT_FOUND)
    contexts.current = name
    contexts.save()
    say(f"now {name}: {contexts.by_name[name].url}")


@app.command("set")
def set_(
    name: str,
    url: Annotated[str | None, typer.Option(help="Address of the API.")] = None,
    project: Annotated[str | None, typer.Option("--project", "-p", help="Project to work in.")] = None,
    ca: Annotated[str | None, typer.Option(help="PEM file of the authority to trust.")] = None,
) -> None:
    """Make or change a context; `bedplate login` puts a token into one."""
    contexts = context.load()
    present = contexts.by_name.get(name, context.Context(name=name))
    if url is not None and url.rstrip("/") != present.url:
        present = replace(present, url=url.rstrip("/"), token="")  # a token stays with its deployment
    if project is not None:
        present = replace(present, project=project)
    if ca is not None:
        present = replace(present, ca=ca)
    if not present.url:
        raise CommandFailed("a new context needs --url", exit_code=Exit.USAGE)
    contexts.put(present, is_current=not contexts.current)
    contexts.save()
    say(f"{name}: {present.url}")


@app.command()
def delete(name: str) -> None:
    """Forget a context and its token."""
    contexts = context.load()
    if contexts.by_name.pop(name, None) is None:
        raise CommandFailed(f"no context {name}", hint="bedplate context list", exit_code=Exit.NOT_FOUND)
    if contexts.current == name:
        contexts.current = ""
    contexts.save()
    say(f"forgot {name}")
