"""`bedplate provider`."""

from __future__ import annotations

from typing import Annotated

import typer

from controlplane.cli import spec
from controlplane.cli.noun import File, Noun, Output
from controlplane.cli.output import Format

noun = Noun(
    "provider",
    "providers",
    columns={"NAME": "name", "KIND": "kind", "URL": "base_url", "MODELS": "models", "AGE": "created_at"},
    wide={"ID": "id", "HINT": "hint", "PROJECTS": "project_ids"},
    in_project=False,
    help="External providers of models (operators).",
)
app = noun.app
noun.add_list()
noun.add_show()
noun.add_delete()


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="A DNS label; its models are called NAME/MODEL.")] = None,
    kind: Annotated[str | None, typer.Option(help="openai, anthropic, or an installed plug-in.")] = None,
    base_url: Annotated[str | None, typer.Option(help="Where it is, without /v1.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="One of its models; may be repeated.")] = None,
    allow_project: Annotated[list[str] | None, typer.Option(help="A project that may use it; default: all.")] = None,
    key_file: Annotated[typer.FileText | None, typer.Option(help="File with its API key; `-`: standard input.")] = None,
    file: File = None,
    output: Output = Format.TABLE,
) -> None:
    """Let projects call models of a provider outside."""
    options = {
        "name": name,
        "kind": kind,
        "base_url": base_url,
        "models": model or None,
        "projects": allow_project or None,
        "key": None if key_file is None else key_file.read().strip(),
    }
    noun.create(spec.merged(file, options), output=output)
