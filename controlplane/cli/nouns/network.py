"""`bedplate network`."""

from __future__ import annotations

from typing import Annotated

import typer

from controlplane.cli import spec
from controlplane.cli.noun import File, InProject, LabelOptions, Noun, Output
from controlplane.cli.output import Format

noun = Noun(
    "network",
    "networks",
    columns={"NAME": "name", "IPV4": "ipv4_cidr", "IPV6": "ipv6_cidr", "AGE": "created_at"},
    wide={"ID": "id", "ENCRYPTION": "encryption", "LABELS": "labels"},
    help="Private networks.",
)
app = noun.app
noun.add_list()
noun.add_show()
noun.add_delete()


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="A DNS label.")] = None,
    cidr: Annotated[str | None, typer.Option(help="IPv4 prefix inside the operator's pool; default: a free one.")] = None,
    firewall: Annotated[str | None, typer.Option(help="Its firewall; default: the project's `default`.")] = None,
    no_firewall: Annotated[bool, typer.Option("--no-firewall", help="Without any: nothing is let in.")] = False,
    label: LabelOptions = None,
    file: File = None,
    project: InProject = None,
    output: Output = Format.TABLE,
) -> None:
    """Make a private network."""
    options = {"name": name, "ipv4_cidr": cidr, "firewall": firewall, "labels": spec.pairs(label)}
    body = spec.merged(file, options) | ({"firewall": None} if no_firewall else {})
    noun.create(body, project=project, output=output)
