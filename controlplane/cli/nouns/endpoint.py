"""`bedplate endpoint`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from controlplane.cli import spec
from controlplane.cli.errors import CommandFailed, Exit
from controlplane.cli.noun import File, InProject, LabelOptions, Noun, Output, Timeout, Waiting, print_stream
from controlplane.cli.output import Format, say, show_many
from controlplane.cli.size import parse_bytes

noun = Noun(
    "endpoint",
    "endpoints",
    columns={
        "NAME": "name",
        "STATUS": "status",
        "MODEL": "model",
        "READY": "observed.ready_replicas",
        "WANTED": "wanted.replicas",
        "ISOLATION": "observed.isolation",
        "AGE": "created_at",
    },
    wide={
        "ID": "id",
        "ROUTES": "routes",
        "REVISION": "revision",
        "CPUS": "wanted.vcpus",
        "MEMORY": "wanted.memory_bytes",
        "WHY": "observed.isolation_reason",
        "LABELS": "labels",
    },
    help="Replicas of a model behind the gateway.",
)
app = noun.app
noun.add_list()
noun.add_show()
noun.add_delete()


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="A DNS label.")] = None,
    model: Annotated[str | None, typer.Option(help="A model of the catalogue.")] = None,
    replicas: Annotated[int | None, typer.Option(min=0, help="How many replicas serve it; default 1.")] = None,
    isolation: Annotated[str | None, typer.Option(help="vm, container or auto (default).")] = None,
    vcpus: Annotated[int | None, typer.Option("--vcpus", "--cpus", min=1, help="Cores of a replica.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of a replica, like 2G.")] = None,
    network: Annotated[
        str | None, typer.Option(help="Name or id of a network; default: `endpoints`, made when missing.")
    ] = None,
    route: Annotated[str | None, typer.Option(help="The model name that applications send; default: the model's.")] = None,
    no_route: Annotated[bool, typer.Option("--no-route", help="Make no route.")] = False,
    label: LabelOptions = None,
    wait_for_capacity: Annotated[bool, typer.Option(help="When no host fits, make it and place it when one does.")] = False,
    file: File = None,
    project: InProject = None,
    output: Output = Format.TABLE,
    wait: Waiting = True,
    timeout: Timeout = "30m",
) -> None:
    """Serve a model and wait until its replicas answer."""
    options: dict[str, Any] = {
        "name": name,
        "model": model,
        "replicas": replicas,
        "isolation": isolation,
        "vcpus": vcpus,
        "memory_bytes": parse_bytes(memory, "--memory"),
        "network": network,
        "route": route,
        "has_route": False if no_route else None,
        "labels": spec.pairs(label),
        "on_no_capacity": "wait" if wait_for_capacity else None,
    }
    noun.create(spec.merged(file, options), project=project, output=output, wait=wait, timeout=timeout)


@app.command()
def scale(
    endpoint: str,
    replicas: Annotated[int, typer.Argument(min=0, help="How many replicas shall serve it.")],
    project: InProject = None,
    output: Output = Format.TABLE,
    wait: Waiting = True,
    timeout: Timeout = "30m",
) -> None:
    """Want another number of replicas; those that are too many drain first."""
    noun.act(endpoint, "scale", {"replicas": replicas}, project=project, output=output, wait=wait, timeout=timeout)


@app.command()
def update(
    endpoint: str,
    label: LabelOptions = None,
    description: Annotated[str | None, typer.Option(help="For people.")] = None,
    model: Annotated[str | None, typer.Option(help="Serve this model instead; the same name: as imported now.")] = None,
    vcpus: Annotated[int | None, typer.Option(min=1, help="Cores of a replica.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of a replica, like 1GiB.")] = None,
    max_surge: Annotated[int | None, typer.Option(min=0, help="So many replicas more meanwhile.")] = None,
    max_unavailable: Annotated[int | None, typer.Option(min=0, help="So many ready ones fewer meanwhile.")] = None,
    weight: Annotated[float | None, typer.Option(min=0, max=100, help="Percent of requests for the first new one.")] = None,
    watch: Annotated[float | None, typer.Option(min=0, help="Seconds to watch it before the others follow.")] = None,
    hold: Annotated[bool | None, typer.Option("--hold", help="Stay at --weight until `endpoint promote`.")] = None,
    file: File = None,
    project: InProject = None,
    output: Output = Format.TABLE,
    wait: Waiting = True,
    timeout: Timeout = "60m",
) -> None:
    """Change what is given. Another model or shape is rolled out replica by replica, and taken back when it does worse."""
    given = {"max_surge": max_surge, "max_unavailable": max_unavailable, "weight": weight, "watch_seconds": watch}
    rollout = {name: value for name, value in {**given, "is_held": hold}.items() if value is not None}
    options = {
        "labels": spec.pairs(label),
        "description": description,
        "model": model,
        "vcpus": vcpus,
        "memory_bytes": parse_bytes(memory, "--memory"),
        "rollout": rollout or None,
    }
    noun.act(endpoint, body=spec.merged(file, options), project=project, output=output, wait=wait, timeout=timeout)


@app.command()
def promote(endpoint: str, project: InProject = None, output: Output = Format.TABLE, wait: Waiting = True) -> None:
    """End the watching of a roll-out: the other replicas follow."""
    noun.act(endpoint, "promote", project=project, output=output, wait=wait, timeout="60m")


@app.command()
def rollback(endpoint: str, project: InProject = None, output: Output = Format.TABLE, wait: Waiting = True) -> None:
    """Go back to the revision before."""
    noun.act(endpoint, "rollback", project=project, output=output, wait=wait, timeout="60m")


@app.command()
def revisions(endpoint: str, project: InProject = None, output: Output = Format.TABLE) -> None:
    """What its replicas were made of, the latest first, with why a revision was taken back."""
    from controlplane.cli.client import Client

    client = Client()
    found = client.get(noun.path(client, project, endpoint, "revisions"))["items"]
    columns = {"NUMBER": "number", "MODEL": "model", "CPUS": "vcpus", "MEMORY": "memory_bytes", "FAILURE": "failure"}
    show_many(found, output, {**columns, "AGE": "created_at"})


@app.command()
def decisions(
    endpoint: str,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The latest so many.")] = 20,
    project: InProject = None,
    output: Output = Format.TABLE,
) -> None:
    """What the autoscaler decided, and why."""
    from controlplane.cli.client import Client

    client = Client()
    found = client.get(noun.path(client, project, endpoint, "decisions"), limit=limit)["items"]
    show_many(found, output, {"AT": "at", "REASON": "reason"})


@app.command()
def logs(
    endpoint: str,
    replica: Annotated[str | None, typer.Option(help="A replica's id or short id; default: each in turn.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C; of one replica.")] = False,
    tail: Annotated[str, typer.Option(help="How much of the end, like 64K.")] = "64K",
    project: InProject = None,
) -> None:
    """What the engines of its replicas said."""
    from controlplane.cli.client import Client, segment

    client = Client()
    shown = client.get(noun.path(client, project, endpoint))["replicas"]
    chosen = [one for one in shown if one["vm_id"] and replica in {None, one["id"], one["short_id"]}]
    if not chosen:
        hint = f"bedplate endpoint show {endpoint}"
        raise CommandFailed(
            "no such replica with a machine", why=f"replica {replica or 'any'}", hint=hint, exit_code=Exit.NOT_FOUND
        )
    if follow and len(chosen) > 1:
        names = ", ".join(one["short_id"] for one in chosen)
        raise CommandFailed("only one replica can be followed", hint=f"add --replica, one of {names}", exit_code=Exit.USAGE)
    for one in chosen:
        if len(chosen) > 1:
            say(f"==> {one['short_id']} on {one['host']}")
        path = f"{client.in_project('vms', project)}/{segment(one['vm_id'])}/log"
        print_stream(client, path, tail_bytes=parse_bytes(tail, "--tail"), follow=str(follow).lower())
