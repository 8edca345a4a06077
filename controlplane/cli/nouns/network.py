"""`bedplate network`."""

from __future__ import annotations

from typing import Annotated

import typer

from controlplane.cli import spec
from controlplane.cli.noun import File, InProject, LabelOptions, Noun, Output
from controlplane.cli.output import Format, say, show_many, show_one

noun = Noun(
    "network",
    "networks",
    columns={"NAME": "name", "IPV4": "ipv4_cidr", "IPV6": "ipv6_cidr", "ENCRYPTION": "encryption", "AGE": "created_at"},
    wide={"ID": "id", "MTU": "mtu_bytes", "LABELS": "labels"},
    help="Private networks.",
)
app = noun.app
noun.add_list()
noun.add_show()
noun.add_update(has_description=False)
noun.add_delete()


@app.command("rotate-keys")
def rotate_keys(output: Output = Format.TABLE) -> None:
    """Give every host a new tunnel key without losing a packet (operators)."""
    from controlplane.cli.client import Client

    show_one(Client().post("/v1/tunnels/rotate-keys", {}), output)


@app.command()
def tunnels(output: Output = Format.TABLE) -> None:
    """The tunnels between hosts, and whose turn it is among their keys (operators)."""
    from controlplane.cli.client import Client

    answer = Client().get("/v1/tunnels")
    if output in (Format.JSON, Format.YAML):
        show_one(answer, output)
        return
    rotation = answer["rotation"]
    say(f"Key generation {rotation['key_generation']}" + (", the next one is on its way" if rotation["is_rotating"] else ""))
    columns = {"HOST": "host", "IPV4": "ipv4", "APPLIED": "is_applied", "KEYS": "public_keys"}
    show_many(answer["hosts"], output, columns, {"ID": "host_id", "IPV6": "ipv6", "HEARD": "heard"})


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="A DNS label.")] = None,
    cidr: Annotated[str | None, typer.Option(help="IPv4 prefix inside the operator's pool; default: a free one.")] = None,
    firewall: Annotated[str | None, typer.Option(help="Its firewall; default: the project's `default`.")] = None,
    no_firewall: Annotated[bool, typer.Option("--no-firewall", help="Without any: nothing is let in.")] = False,
    encryption: Annotated[
        str | None, typer.Option(help="`wireguard`, or `none` over data interfaces declared as trusted; default: as set.")
    ] = None,
    label: LabelOptions = None,
    file: File = None,
    project: InProject = None,
    output: Output = Format.TABLE,
) -> None:
    """Make a private network."""
    options = {"name": name, "ipv4_cidr": cidr, "encryption": encryption, "firewall": firewall, "labels": spec.pairs(label)}
    body = spec.merged(file, options) | ({"firewall": None} if no_firewall else {})
    noun.create(body, project=project, output=output)
