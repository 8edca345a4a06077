"""`bedplate price`."""

from __future__ import annotations

from typing import Annotated

import typer

from controlplane.cli import spec
from controlplane.cli.noun import File, Noun, Output
from controlplane.cli.output import Format

noun = Noun(
    "price",
    "prices",
    columns={"NAME": "name", "MODEL": "model", "PROMPT": "prompt", "COMPLETION": "completion", "FROM": "valid_from"},
    wide={"ID": "id", "CACHED": "cached", "REQUEST": "request"},
    in_project=False,
    help="The price book: what models cost.",
)
app = noun.app
noun.add_list()
noun.add_show()
noun.add_delete()


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="A DNS label.")] = None,
    model: Annotated[str | None, typer.Option(help="The catalogue's name of the model, or * for every other.")] = None,
    prompt: Annotated[str | None, typer.Option(help="For a million tokens of prompts, like 0.15.")] = None,
    cached: Annotated[str | None, typer.Option(help="For a million tokens from the cache; default: as prompts.")] = None,
    completion: Annotated[str | None, typer.Option(help="For a million tokens of answers.")] = None,
    request: Annotated[str | None, typer.Option(help="For each request.")] = None,
    file: File = None,
    output: Output = Format.TABLE,
) -> None:
    """Give a model a price, from now on or from `valid_from` of the file."""
    options = {
        "name": name,
        "model": model,
        "prompt": prompt,
        "cached": cached,
        "completion": completion,
        "request": request,
    }
    noun.create(spec.merged(file, options), output=output)
