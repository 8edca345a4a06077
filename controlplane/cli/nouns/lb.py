"""`bedplate lb`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from controlplane.cli import spec
from controlplane.cli.errors import CommandFailed, Exit
from controlplane.cli.noun import Description, File, InProject, LabelOptions, Noun, Output, Timeout, Waiting
from controlplane.cli.output import Format

noun = Noun(
    "load balancer",
    "loadbalancers",
    columns={"NAME": "name", "STATUS": "status", "VIPS": "vips", "BACKENDS": "backends.target", "AGE": "created_at"},
    wide={"ID": "id", "EDGES": "carried_by.host", "PROFILE": "profile", "LABELS": "labels"},
    help="Load balancers (TCP and UDP).",
)
app = noun.app
app.info.name = "lb"
noun.add_list()
noun.add_show()
noun.add_delete()

Backend = Annotated[str, typer.Argument(help="Id of the backend, or name or id of its VM or endpoint.")]
OnVm = Annotated[str | None, typer.Option("--vm", help="Name or id of a VM.")]
OnEndpoint = Annotated[str | None, typer.Option("--endpoint", help="Name or id of an endpoint.")]

Listen = Annotated[list[str] | None, typer.Option(help="PORT[:TARGET][/udp], like 80:8080; may be repeated.")]
Algorithm = Annotated[str | None, typer.Option(help="hash (default), round_robin or random.")]
Profile = Annotated[str | None, typer.Option(help="Timeouts: default, web, grpc, stream or dns.")]
Probe = Annotated[str | None, typer.Option(help="tcp (default), grpc, http:PATH, https:PATH or none.")]
MostEdges = Annotated[int | None, typer.Option(help="By how many edge hosts at most it is carried; default 2.")]


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="A DNS label.")] = None,
    listen: Listen = None,
    vm: Annotated[list[str] | None, typer.Option("--vm", help="Backend VM[=WEIGHT]; may be repeated.")] = None,
    endpoint: Annotated[list[str] | None, typer.Option(help="Backend endpoint; may be repeated.")] = None,
    address: Annotated[list[str] | None, typer.Option(help="Reserved address to serve at; may be repeated.")] = None,
    network: Annotated[str | None, typer.Option(help="Serve at a private address in this network.")] = None,
    algorithm: Algorithm = None,
    profile: Profile = None,
    probe: Probe = None,
    edges: MostEdges = None,
    description: Description = None,
    label: LabelOptions = None,
    file: File = None,
    project: InProject = None,
    output: Output = Format.TABLE,
    wait: Waiting = True,
    timeout: Timeout = "2m",
) -> None:
    """Make a load balancer; the rest of what it can do comes from --file."""
    backends = [_weighed(text) for text in vm or ()] + [{"endpoint": text} for text in endpoint or ()]
    options: dict[str, Any] = {
        "name": name,
        "backends": backends or None,
        "addresses": address,
        "network": network,
        **_settings(listen, algorithm, profile, edges),
        "description": description,
        "labels": spec.pairs(label),
    }
    body = spec.merged(file, options) | _probed(probe)
    if not body.get("addresses") and not body.get("network"):
        raise CommandFailed(
            "it would have no address", hint="--address NAME (reserved before) or --network NAME", exit_code=Exit.USAGE
        )
    noun.create(body, project=project, output=output, wait=wait, timeout=timeout)


@app.command()
def update(
    lb: str,
    listen: Listen = None,
    algorithm: Algorithm = None,
    profile: Profile = None,
    probe: Probe = None,
    edges: MostEdges = None,
    description: Description = None,
    label: LabelOptions = None,
    file: File = None,
    project: InProject = None,
    output: Output = Format.TABLE,
    wait: Waiting = True,
    timeout: Timeout = "2m",
) -> None:
    """Change what is given; --listen replaces all ports at once."""
    options = {**_settings(listen, algorithm, profile, edges), "description": description, "labels": spec.pairs(label)}
    body = spec.merged(file, options) | _probed(probe)
    noun.act(lb, body=body, project=project, output=output, wait=wait, timeout=timeout)


@app.command()
def add(
    lb: str,
    vm: OnVm = None,
    endpoint: OnEndpoint = None,
    address: Annotated[str | None, typer.Option(help="Private address of an interface in the project.")] = None,
    weight: Annotated[int | None, typer.Option(help="1 to 256; default 1.")] = None,
    project: InProject = None,
    output: Output = Format.TABLE,
    wait: Waiting = True,
    timeout: Timeout = "2m",
) -> None:
    """Add a backend."""
    options = {"vm": vm, "endpoint": endpoint, "address": address, "weight": weight}
    body = {key: value for key, value in options.items() if value is not None}
    noun.act(lb, "backends", body, project=project, output=output, wait=wait, timeout=timeout)


@app.command()
def weigh(
    lb: str,
    backend: Backend,
    weight: Annotated[int, typer.Argument(help="1 to 256.")],
    project: InProject = None,
    output: Output = Format.TABLE,
) -> None:
    """Change a backend's share of new flows; open ones stay where they are."""
    from controlplane.cli.client import Client

    client = Client()
    client.patch(noun.path(client, project, lb, _on(backend)), {"weight": weight})
    noun.print_one(lb, output, project=project)


def _add_backend_action(verb: str, help: str) -> None:
    def act(
        lb: str,
        backend: Backend,
        project: InProject = None,
        output: Output = Format.TABLE,
        wait: Waiting = True,
        timeout: Timeout = "2m",
    ) -> None:
        noun.act(lb, _on(backend, verb), project=project, output=output, wait=wait, timeout=timeout)

    app.command(verb, help=help)(act)


_add_backend_action("remove", "Take a backend away at once; its open flows end (drain it first to let them).")
_add_backend_action("drain", "Send nothing new to a backend.")
_add_backend_action("activate", "Undo `drain` and `eject`.")


@app.command()
def eject(
    lb: str,
    backend: Backend,
    seconds: Annotated[int, typer.Option("--seconds", help="For how long.")] = 300,
    reason: Annotated[str, typer.Option(help="For people.")] = "",
    project: InProject = None,
    output: Output = Format.TABLE,
    wait: Waiting = True,
    timeout: Timeout = "2m",
) -> None:
    """Take a backend out for a while, open flows included."""
    body = {"seconds": seconds, "reason": reason}
    noun.act(lb, _on(backend, "eject"), body, project=project, output=output, wait=wait, timeout=timeout)


def _on(backend: str, action: str = "") -> str:
    from controlplane.cli.client import segment

    return "/".join(["backends", segment(backend), *([action] if action else [])])


def _settings(listen: list[str] | None, algorithm: str | None, profile: str | None, edges: int | None) -> dict[str, Any]:
    listeners = [listener(text) for text in listen] if listen else None
    return {"listeners": listeners, "algorithm": algorithm, "profile": profile, "edges": edges}


def _probed(text: str | None) -> dict[str, Any]:
    """The body's `probe`, when one was given: `none` is null there."""
    if text is None:
        return {}
    kind, _, path = text.partition(":")
    return {"probe": None if kind == "none" else {"kind": kind, **({"path": path} if path else {})}}


def listener(text: str) -> dict[str, Any]:
    """`80`, `80:8080` or `53/udp` as the API takes it; raises CommandFailed."""
    ports, _, protocol = text.partition("/")
    port, _, target = ports.partition(":")
    if not port.isdigit() or (target and not target.isdigit()):
        raise CommandFailed(f"{text!r} is no listener", hint="like 80, 80:8080 or 53/udp", exit_code=Exit.USAGE)
    body: dict[str, Any] = {"protocol": protocol or "tcp", "port": int(port)}
    return body | ({"target_port": int(target)} if target else {})


def _weighed(text: str) -> dict[str, Any]:
    name, _, weight = text.partition("=")
    if weight and not weight.isdigit():
        raise CommandFailed(f"{text!r} is no backend", hint="like web-1 or web-1=3", exit_code=Exit.USAGE)
    return {"vm": name, **({"weight": int(weight)} if weight else {})}
