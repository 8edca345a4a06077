"""`bedplate address`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from controlplane.cli import spec
from controlplane.cli.errors import CommandFailed, Exit
from controlplane.cli.noun import File, InProject, LabelOptions, Noun, Output, Timeout, Waiting
from controlplane.cli.output import Format

noun = Noun(
    "address",
    "addresses",
    columns={"NAME": "name", "ADDRESS": "address", "TARGET": "target", "HELD BY": "held_by", "AGE": "created_at"},
    wide={"ID": "id", "STANDBY": "standby", "POOL": "pool_id", "LABELS": "labels"},
    help="Reserved public addresses.",
)
app = noun.app
noun.add_list()
noun.add_show()
noun.add_update(has_description=False)
noun.add_delete("release")


@app.command()
def reserve(
    name: Annotated[str | None, typer.Argument(help="A DNS label.")] = None,
    ipv6: Annotated[bool, typer.Option("--ipv6", help="An IPv6 address; default: IPv4.")] = False,
    pool: Annotated[str | None, typer.Option(help="From this pool; default: any.")] = None,
    address: Annotated[str | None, typer.Option(help="This very address; default: a free one.")] = None,
    label: LabelOptions = None,
    file: File = None,
    project: InProject = None,
    output: Output = Format.TABLE,
) -> None:
    """Reserve a public address for the project."""
    options: dict[str, Any] = {
        "name": name,
        "family": "ipv6" if ipv6 else None,
        "pool": pool,
        "address": address,
        "labels": spec.pairs(label),
    }
    noun.create(spec.merged(file, options), project=project, output=output)


@app.command()
def attach(
    address: str,
    vm: Annotated[str | None, typer.Option("--vm", help="Name or id of a VM.")] = None,
    lb: Annotated[str | None, typer.Option("--lb", help="Name or id of a load balancer.")] = None,
    move: Annotated[bool, typer.Option("--move", help="Take it from what it leads to now.")] = False,
    project: InProject = None,
    output: Output = Format.TABLE,
    wait: Waiting = True,
    timeout: Timeout = "2m",
) -> None:
    """Let it lead to a VM or a load balancer."""
    if (vm is None) == (lb is None):
        raise CommandFailed("name a VM or a load balancer", hint="--vm NAME or --lb NAME", exit_code=Exit.USAGE)
    body: dict[str, Any] = {"vm": vm} if vm else {"loadbalancer": lb}
    noun.act(address, "attach", body | {"move": move}, project=project, output=output, wait=wait, timeout=timeout)


@app.command()
def detach(
    address: str, project: InProject = None, output: Output = Format.TABLE, wait: Waiting = True, timeout: Timeout = "2m"
) -> None:
    """Let it lead nowhere; it stays reserved."""
    noun.act(address, "detach", project=project, output=output, wait=wait, timeout=timeout)
