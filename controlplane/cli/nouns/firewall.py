"""`bedplate firewall`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from controlplane.cli import spec
from controlplane.cli.errors import CommandFailed, Exit
from controlplane.cli.noun import Description, File, InProject, LabelOptions, Noun, Output, Timeout, Waiting
from controlplane.cli.output import Format

ANYWHERE = ["0.0.0.0/0", "::/0"]

noun = Noun(
    "firewall",
    "firewalls",
    columns={"NAME": "name", "ATTACHED TO": "attached_to.name", "HOSTS": "hosts", "AGE": "created_at"},
    wide={"ID": "id", "LABELS": "labels"},
    help="Firewalls: what machines let in and out.",
)
app = noun.app
noun.add_list()
noun.add_show()
noun.add_update()
noun.add_delete()

What = Annotated[str, typer.Argument(help="tcp/22, udp/8000-8100, tcp, udp, icmp or any.")]
From = Annotated[list[str] | None, typer.Option("--from", help="Ingress from this prefix, or `any`; may be repeated.")]
To = Annotated[list[str] | None, typer.Option("--to", help="Egress to this prefix, or `any`; may be repeated.")]
Network = Annotated[str | None, typer.Option(help="Name or id of a network.")]
Peer = Annotated[str | None, typer.Option("--firewall", help="The far end is whatever this firewall is attached to.")]
Egress = Annotated[bool, typer.Option("--egress", help="From the machines; with --network or --firewall.")]
OnVm = Annotated[str | None, typer.Option("--vm", help="Name or id of a VM.")]


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="A DNS label.")] = None,
    description: Description = None,
    network: Annotated[list[str] | None, typer.Option(help="Attach it to this network; may be repeated.")] = None,
    vm: Annotated[list[str] | None, typer.Option("--vm", help="Attach it to this VM; may be repeated.")] = None,
    label: LabelOptions = None,
    file: File = None,
    project: InProject = None,
    output: Output = Format.TABLE,
    wait: Waiting = True,
    timeout: Timeout = "2m",
) -> None:
    """Make a firewall; its rules come from --file, or by `allow` and `deny`."""
    options: dict[str, Any] = {
        "name": name,
        "description": description,
        "networks": network,
        "vms": vm,
        "labels": spec.pairs(label),
    }
    noun.create(spec.merged(file, options), project=project, output=output, wait=wait, timeout=timeout)


def _add_rule_verb(verb: str, help: str) -> None:
    def act(
        firewall: str,
        what: What,
        sources: From = None,
        destinations: To = None,
        network: Network = None,
        peer: Peer = None,
        egress: Egress = False,
        project: InProject = None,
        output: Output = Format.TABLE,
        wait: Waiting = True,
        timeout: Timeout = "2m",
    ) -> None:
        body = rule(what, sources, destinations, network, peer, is_egress=egress)
        noun.act(firewall, verb, body, project=project, output=output, wait=wait, timeout=timeout)

    app.command(verb, help=help)(act)


_add_rule_verb("allow", "Add a rule that allows, like `allow web tcp/443 --from any`.")
_add_rule_verb("deny", "Add a rule that denies; it wins over every allowance.")


@app.command()
def revoke(
    firewall: str,
    rule_id: Annotated[str, typer.Argument(metavar="RULE", help="The rule's id, as `show` prints it.")],
    project: InProject = None,
    output: Output = Format.TABLE,
    wait: Waiting = True,
    timeout: Timeout = "2m",
) -> None:
    """Take a rule away; flows that it alone let in end."""
    noun.act(firewall, "revoke", {"rule": rule_id}, project=project, output=output, wait=wait, timeout=timeout)


def _add_target_verb(verb: str, help: str) -> None:
    def act(
        firewall: str,
        network: Network = None,
        vm: OnVm = None,
        project: InProject = None,
        output: Output = Format.TABLE,
        wait: Waiting = True,
        timeout: Timeout = "2m",
    ) -> None:
        noun.act(firewall, verb, target(network, vm), project=project, output=output, wait=wait, timeout=timeout)

    app.command(verb, help=help)(act)


_add_target_verb("attach", "Let it apply to a network or to one VM.")
_add_target_verb("detach", "Let it not apply there any more.")


def rule(
    what: str,
    sources: list[str] | None,
    destinations: list[str] | None,
    network: str | None,
    peer: str | None,
    *,
    is_egress: bool,
) -> dict[str, Any]:
    """The body of a rule; raises CommandFailed."""
    protocol, _, ports = what.partition("/")
    body: dict[str, Any] = {"protocol": protocol.lower()}
    if ports:
        first, _, last = ports.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise CommandFailed(
                f"{what!r} is no protocol with ports", hint="like tcp/22 or udp/8000-8100", exit_code=Exit.USAGE
            )
        body |= {"port_first": int(first), "port_last": int(last or first)}
    ends = [end for end in (sources, destinations, network, peer) if end]
    if len(ends) != 1:
        raise CommandFailed(
            "name one far end", hint="--from any, --to 192.0.2.0/24, --network NAME or --firewall NAME", exit_code=Exit.USAGE
        )
    body["direction"] = "egress" if destinations or is_egress else "ingress"
    cidrs = sources or destinations
    if cidrs:
        body["cidrs"] = [part for text in cidrs for part in (ANYWHERE if text == "any" else [text])]
    body |= {"network": network} if network else {}
    body |= {"firewall": peer} if peer else {}
    return body


def target(network: str | None, vm: str | None) -> dict[str, Any]:
    """The body of `attach` and `detach`; raises CommandFailed."""
    if (network is None) == (vm is None):
        raise CommandFailed("name a network or a VM", hint="--network NAME or --vm NAME", exit_code=Exit.USAGE)
    return {"network": network} if network else {"vm": vm}
