"""`bedplate lb`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from controlplane.cli import spec
from controlplane.cli.errors import CommandFailed, Exit
from controlplane.cli.noun import File, InProject, LabelOptions, Noun, Output, Timeout, Waiting
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


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="A DNS label.")] = None,
    listen: Annotated[list[str] | None, typer.Option(help="PORT[:TARGET][/udp], like 80:8080; may be repeated.")] = None,
    vm: Annotated[list[str] | None, typer.Option("--vm", help="Backend VM[=WEIGHT]; may be repeated.")] = None,
    endpoint: Annotated[list[str] | None, typer.Option(help="Backend endpoint; may be repeated.")] = None,
    address: Annotated[list[str] | None, typer.Option(help="Reserved address to serve at; may be repeated.")] = None,
    network: Annotated[str | None, typer.Option(help="Serve at a private address in this network.")] = None,
    algorithm: Annotated[str | None, typer.Option(help="hash (default), round_robin or random.")] = None,
    profile: Annotated[str | None, typer.Option(help="Timeouts: default, web, grpc, stream or dns.")] = None,
    probe: Annotated[str | None, typer.Option(help="tcp (default), grpc, http:PATH, https:PATH or none.")] = None,
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
        "listeners": [listener(text) for text in listen] if listen else None,
        "backends": backends or None,
        "addresses": address,
        "network": network,
        "algorithm": algorithm,
        "profile": profile,
        "labels": spec.pairs(label),
    }
    body = spec.merged(file, options)
    if probe is not None:
        kind, _, path = probe.partition(":")
        body["probe"] = None if kind == "none" else {"kind": kind, **({"path": path} if path else {})}
    if not body.get("addresses") and not body.get("network"):
        raise CommandFailed(
            "it would have no address", hint="--address NAME (reserved before) or --network NAME", exit_code=Exit.USAGE
        )
    noun.create(body, project=project, output=output, wait=wait, timeout=timeout)


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


def _on(backend: str, action: str) -> str:
    from controlplane.cli.client import segment

    return f"backends/{segment(backend)}/{action}"


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
