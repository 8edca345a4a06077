"""`bedplate pool`."""

from __future__ import annotations

from typing import Annotated

import typer

from controlplane.cli import spec
from controlplane.cli.noun import Description, File, LabelOptions, Noun, Output
from controlplane.cli.output import Format

noun = Noun(
    "pool",
    "pools",
    columns={"NAME": "name", "CIDR": "cidr", "ANNOUNCE": "announce", "AGE": "created_at"},
    wide={"ID": "id", "EXCLUDED": "excluded", "LABELS": "labels"},
    in_project=False,
    help="Pools of public addresses (operators).",
)
app = noun.app
noun.add_list()
noun.add_show()
noun.add_delete()

Exclude = Annotated[list[str] | None, typer.Option(help="Address or prefix inside that is not given away.")]


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="A DNS label.")] = None,
    cidr: Annotated[str | None, typer.Option(help="IPv4 or IPv6 prefix.")] = None,
    exclude: Exclude = None,
    announce: Annotated[str | None, typer.Option(help="arp (default), bgp or none.")] = None,
    description: Description = None,
    label: LabelOptions = None,
    file: File = None,
    output: Output = Format.TABLE,
) -> None:
    """Make a pool of public addresses."""
    options = {
        "name": name,
        "cidr": cidr,
        "excluded": exclude,
        "announce": announce,
        "description": description,
        "labels": spec.pairs(label),
    }
    noun.create(spec.merged(file, options), output=output)


@app.command()
def update(
    pool: str,
    exclude: Exclude = None,
    description: Description = None,
    label: LabelOptions = None,
    file: File = None,
    output: Output = Format.TABLE,
) -> None:
    """Change what is given; addresses that are reserved already stay so."""
    options = {"excluded": exclude, "description": description, "labels": spec.pairs(label)}
    noun.act(pool, body=spec.merged(file, options), output=output)
