"""`bedplate vm`."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from controlplane.cli import spec
from controlplane.cli.errors import CommandFailed, Exit
from controlplane.cli.noun import File, InProject, LabelOptions, Noun, Output, Timeout, Waiting, print_stream
from controlplane.cli.output import Format
from controlplane.cli.size import parse_bytes

noun = Noun(
    "vm",
    "vms",
    columns={
        "NAME": "name",
        "STATUS": "status",
        "IPV4": "ipv4",
        "CPUS": "wanted.vcpus",
        "MEMORY": "wanted.memory_bytes",
        "IMAGE": "image",
        "AGE": "created_at",
    },
    wide={"ID": "id", "IPV6": "ipv6", "HOST": "observed.host", "DRIVER": "observed.driver", "LABELS": "labels"},
    help="Virtual machines.",
)
app = noun.app
noun.add_list()
noun.add_show()
noun.add_delete()

Vcpus = Annotated[int | None, typer.Option("--vcpus", "--cpus", min=1, help="Virtual cores.")]
Memory = Annotated[str | None, typer.Option(help="Memory, like 2G.")]


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="A DNS label.")] = None,
    image: Annotated[str | None, typer.Option(help="Name or id of an image.")] = None,
    network: Annotated[str | None, typer.Option(help="Name or id of a network.")] = None,
    vcpus: Vcpus = None,
    memory: Memory = None,
    disk: Annotated[str | None, typer.Option(help="Size of the root disk, like 10G; default: what the image needs.")] = None,
    user: Annotated[str | None, typer.Option(help="Login user; default: the image's.")] = None,
    ssh_key: Annotated[list[str] | None, typer.Option(help="Public key, or a file that holds one; may be repeated.")] = None,
    user_data: Annotated[Path | None, typer.Option(help="File with cloud-init user data or a first-boot script.")] = None,
    label: LabelOptions = None,
    location: Annotated[str | None, typer.Option(help="Only hosts at this location.")] = None,
    host: Annotated[str | None, typer.Option(help="Exactly this host (operators).")] = None,
    host_label: Annotated[list[str] | None, typer.Option(help="Only hosts with this label, KEY=VALUE.")] = None,
    protect: Annotated[bool | None, typer.Option("--protect", help="Refuse deletion until unprotected.")] = None,
    stopped: Annotated[bool | None, typer.Option("--stopped", help="Make it without starting it.")] = None,
    wait_for_capacity: Annotated[bool, typer.Option(help="When no host fits, make it and start it when one does.")] = False,
    file: File = None,
    project: InProject = None,
    output: Output = Format.TABLE,
    wait: Waiting = True,
    timeout: Timeout = "30m",
) -> None:
    """Make a VM and wait until it runs."""
    placement = {"location": location, "host": host, "host_labels": spec.pairs(host_label, "--host-label")}
    options: dict[str, Any] = {
        "name": name,
        "image": image,
        "network": network,
        "vcpus": vcpus,
        "memory_bytes": parse_bytes(memory, "--memory"),
        "disk_bytes": parse_bytes(disk, "--disk"),
        "user": user,
        "ssh_keys": _keys(ssh_key),
        "user_data": _text(user_data),
        "labels": spec.pairs(label),
        "placement": {key: value for key, value in placement.items() if value is not None} or None,
        "is_protected": protect,
        "power": "stopped" if stopped else None,
        "on_no_capacity": "wait" if wait_for_capacity else None,
    }
    noun.create(spec.merged(file, options), project=project, output=output, wait=wait, timeout=timeout)


def _keys(given: list[str] | None) -> list[str] | None:
    if not given:
        return None
    keys: list[str] = []
    for text in given:
        content = text if " " in text else _text(Path(text).expanduser()) or ""
        keys += [line.strip() for line in content.splitlines() if line.strip() and not line.startswith("#")]
    return keys


def _text(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise CommandFailed(f"cannot read {path}", why=str(error), exit_code=Exit.USAGE) from error


def _act(verb: str, summary: str) -> None:
    def act(
        vm: str, project: InProject = None, output: Output = Format.TABLE, wait: Waiting = True, timeout: Timeout = "30m"
    ) -> None:
        noun.act(vm, verb, project=project, output=output, wait=wait, timeout=timeout)

    app.command(verb, help=summary)(act)


_act("start", "Start a VM.")
_act("stop", "Stop a VM in an orderly way; it keeps its disk, addresses and share of its host.")
_act("restart", "Stop and start a VM; a waiting resize applies.")


@app.command()
def resize(
    vm: str,
    vcpus: Vcpus = None,
    memory: Memory = None,
    project: InProject = None,
    output: Output = Format.TABLE,
    wait: Waiting = True,
    timeout: Timeout = "30m",
) -> None:
    """Change cores and memory; a running VM gets them at its next restart or start."""
    options = {"vcpus": vcpus, "memory_bytes": parse_bytes(memory, "--memory")}
    body = {key: value for key, value in options.items() if value is not None}
    if not body:
        raise CommandFailed("nothing to change", hint="give --vcpus, --memory or both", exit_code=Exit.USAGE)
    noun.act(vm, "resize", body, project=project, output=output, wait=wait, timeout=timeout)


@app.command()
def update(
    vm: str,
    label: LabelOptions = None,
    description: Annotated[str | None, typer.Option(help="For people.")] = None,
    protect: Annotated[bool | None, typer.Option("--protect/--unprotect", help="Whether deletion is refused.")] = None,
    file: File = None,
    project: InProject = None,
    output: Output = Format.TABLE,
) -> None:
    """Change what is given."""
    options = {"labels": spec.pairs(label), "description": description, "is_protected": protect}
    noun.act(vm, body=spec.merged(file, options), project=project, output=output)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def ssh(
    context: typer.Context,
    vm: str,
    user: Annotated[str | None, typer.Option("--user", "-l", help="Login user; default: the VM's.")] = None,
    identity: Annotated[Path | None, typer.Option("--identity", "-i", help="Private key.")] = None,
    direct: Annotated[bool, typer.Option("--direct", help="Connect to the VM's own address.")] = False,
    project: InProject = None,
) -> None:
    """Log in, through the control plane and the VM's host. What follows `--` is the command to run."""
    from controlplane.cli.client import Client

    client = Client()
    item = client.get(noun.path(client, project, vm))
    if item["status"] != "running":
        raise CommandFailed(f"{vm} is {item['status']}", hint=f"bedplate vm start {vm}", exit_code=Exit.CONFLICT)
    program = shutil.which("ssh")
    if program is None:
        raise CommandFailed("there is no ssh program here", hint="apt install openssh-client")
    argv = [program, "-o", f"HostKeyAlias={item['id']}", "-o", "StrictHostKeyChecking=accept-new"]
    argv += ["-i", str(identity)] if identity else []
    if not direct:
        relay = [sys.executable, "-P", "-m", "controlplane.cli.main", "vm", "port", item["id"], "22"]
        argv += ["-o", "ProxyCommand=" + shlex.join([*relay, "--project", item["project_id"]])]
    os.execv(program, [*argv, "-l", user or item["user"], item["ipv4"], *context.args])  # noqa: S606 - constant argv, no shell


@app.command()
def port(vm: str, port: Annotated[int, typer.Argument(min=1, max=65535)], project: InProject = None) -> None:
    """Connect stdin and stdout to a TCP port of a VM, through the control plane and the VM's host."""
    from controlplane.cli.client import Client
    from controlplane.cli.terminal import relay

    client = Client()
    relay(client.socket(noun.path(client, project, vm, f"port/{port}")))


@app.command()
def console(vm: str, project: InProject = None) -> None:
    """The serial console. Ctrl-] leaves it."""
    from controlplane.cli.client import Client
    from controlplane.cli.terminal import relay

    client = Client()
    relay(client.socket(noun.path(client, project, vm, "console")), is_terminal=True)


@app.command()
def logs(
    vm: str,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    tail: Annotated[str, typer.Option(help="How much of the end, like 64K.")] = "64K",
    project: InProject = None,
) -> None:
    """What the machine said on its serial console."""
    from controlplane.cli.client import Client

    client = Client()
    path = noun.path(client, project, vm, "log")
    print_stream(client, path, tail_bytes=parse_bytes(tail, "--tail"), follow=str(follow).lower())
