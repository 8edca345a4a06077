"""`bedplate host`: servers, from the first look to the last trace."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from controlplane.cli import spec
from controlplane.cli.errors import CommandFailed, Exit
from controlplane.cli.noun import File, LabelOptions, Noun, Output, Timeout, Waiting, Yes, confirm
from controlplane.cli.output import Format, print_table, say, show_one

noun = Noun(
    "host",
    "hosts",
    in_project=False,
    columns={
        "NAME": "name",
        "STATE": "state",
        "LINK": "link",
        "ROLES": "roles",
        "DRAINED": "is_cordoned",
        "VCPUS": "observed.allocatable.vcpus",
        "ADDRESS": "address",
        "AGE": "created_at",
    },
    wide={"ID": "id", "LOCATION": "location", "DRIVERS": "observed.machine_drivers", "AGENT": "observed.agent_version"},
    help="The servers of this deployment.",
)
app = noun.app
noun.add_list()
noun.add_show()

Place = Annotated[str, typer.Argument(metavar="[USER@]HOST[:PORT]", help="Where SSH is reached.")]
Jump = Annotated[str | None, typer.Option(help="USER@HOST[:PORT] to go through.")]
Identity = Annotated[Path | None, typer.Option(help="Private key for this login only; default: the bootstrap key.")]
Sudo = Annotated[bool | None, typer.Option("--sudo", help="The user becomes root by sudo -n.")]
KeyFingerprint = Annotated[str | None, typer.Option(help="SHA256:… of the host key: checked instead of asked for.")]
DataInterface = Annotated[str | None, typer.Option(help="The trusted network between hosts.")]
Cpus = Annotated[int | None, typer.Option(min=1, help="Cores for machines; default: all.")]
Memory = Annotated[int | None, typer.Option(min=256, help="Memory for machines in MiB; default: nearly all.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
_MARKS = {"ok": "ok", "warn": "warn", "fail": "FAIL"}


@app.command("bootstrap-key")
def bootstrap_key() -> None:
    """Print the public key that enrols hosts: it goes into authorized_keys of root there."""
    from controlplane.cli.client import Client

    print(Client().get("/v1/hosts/bootstrap-key")["public_key"])


@app.command()
def preflight(
    place: Place,
    jump: Jump = None,
    identity: Identity = None,
    sudo: Sudo = None,
    host_key_fingerprint: KeyFingerprint = None,
    as_json: AsJson = False,
    timeout: Timeout = "5m",
) -> None:
    """Look at a host without changing it: is it fit, and what would be changed?"""
    from controlplane.cli.client import Client

    body = _login(place, jump=jump, identity=identity, sudo=sudo, host_key_fingerprint=host_key_fingerprint)
    found = _preflight(Client(), body, timeout)
    if as_json:
        show_one(found, Format.JSON)
    else:
        _print_report(found)
    if not found["report"]["is_fit"]:
        raise typer.Exit(Exit.FAILED)


@app.command()
def add(
    place: Place,
    name: Annotated[str | None, typer.Option(help="A DNS label; default: the host's own name.")] = None,
    jump: Jump = None,
    identity: Identity = None,
    sudo: Sudo = None,
    host_key_fingerprint: KeyFingerprint = None,
    role: Annotated[list[str] | None, typer.Option(help="compute, edge or gateway; may be repeated.")] = None,
    location: Annotated[str | None, typer.Option(help="Rack, room or site.")] = None,
    label: LabelOptions = None,
    labels: Annotated[list[str] | None, typer.Option(help="The same as --label.")] = None,
    data_interface: DataInterface = None,
    cpus: Cpus = None,
    memory_mib: Memory = None,
    qemu_on_kvm: Annotated[
        bool | None, typer.Option("--qemu-on-kvm", help="Let QEMU run machines where Cloud Hypervisor is missing.")
    ] = None,
    artifact_dir: Annotated[
        Path | None, typer.Option(help="Directory with artifacts that cannot be fetched, such as cloud-hypervisor.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List every change, make none.")] = False,
    yes: Yes = False,
    file: File = None,
    output: Output = Format.TABLE,
    wait: Waiting = True,
    timeout: Timeout = "30m",
) -> None:
    """Add a host, or repair one: shows its key, asks whether that is the right one, installs the agent."""
    from controlplane.cli.client import Client

    spec.merged(file, {})  # what cannot be read is said before a host is asked
    client = Client()
    login = _login(place, jump=jump, identity=identity, sudo=sudo, host_key_fingerprint=host_key_fingerprint)
    memory = memory_mib << 20 if memory_mib is not None else None
    share = {"data_interface": data_interface, "cpus": cpus, "memory_bytes": memory, "qemu_on_kvm": qemu_on_kvm}
    login |= {key: value for key, value in share.items() if value is not None}
    if artifact_dir is not None:
        _upload_artifacts(client, artifact_dir, yes=yes)
    if dry_run or host_key_fingerprint is None or name is None:
        found = _preflight(client, login, timeout)
        if dry_run:
            _print_changes(found, output)
            return
        _confirm_key(found, host_key_fingerprint, yes=yes)
        login["host_key_fingerprint"] = found["fingerprint"]
        name = name or found["report"]["facts"]["hostname"].partition(".")[0].lower()
    options = {
        **login,
        "name": name,
        "roles": role,
        "location": location,
        "labels": spec.pairs([*(label or []), *(labels or [])] or None),
    }
    noun.create(spec.merged(file, options), output=output, wait=wait, timeout=timeout)


@app.command()
def update(
    host: str,
    location: Annotated[str | None, typer.Option(help="Rack, room or site.")] = None,
    bgp_as: Annotated[int | None, typer.Option(help="The host's AS number; with --bgp-peer.")] = None,
    bgp_peer: Annotated[
        list[str] | None, typer.Option(help="ADDRESS=AS of a router that is told of addresses; may be repeated.")
    ] = None,
    label: LabelOptions = None,
    file: File = None,
    output: Output = Format.TABLE,
    wait: Waiting = True,
) -> None:
    """Change what is given. Passwords of routers go in by --file: `bgp: {peers: [{password: …}]}`."""
    body = spec.merged(file, {"location": location, "labels": spec.pairs(label)})
    if bgp_peer or bgp_as:
        body["bgp"] = {"local_as": bgp_as, "peers": [_peer(text) for text in bgp_peer or ()]}
    noun.act(host, body=body, output=output, wait=wait)


def _peer(text: str) -> dict[str, Any]:
    address, _, number = text.partition("=")
    if not number.isdigit():
        raise CommandFailed(f"{text!r} is no router", hint="like 192.0.2.1=65001", exit_code=Exit.USAGE)
    return {"address": address, "peer_as": int(number)}


@app.command()
def drain(host: str, output: Output = Format.TABLE, wait: Waiting = True) -> None:
    """Keep new machines away; those that are there stay."""
    noun.act(host, "drain", output=output, wait=wait)


@app.command()
def undrain(host: str, output: Output = Format.TABLE, wait: Waiting = True) -> None:
    """Let new machines come again."""
    noun.act(host, "undrain", output=output, wait=wait)


@app.command()
def reboot(host: str, yes: Yes = False, output: Output = Format.TABLE, wait: Waiting = True, timeout: Timeout = "30m") -> None:
    """Reboot; the host's machines come back with it."""
    confirm(f"Reboot {host} and every machine on it?", yes=yes)
    noun.act(host, "reboot", output=output, wait=wait, timeout=timeout)


@app.command()
def inventory(host: str, output: Output = Format.YAML) -> None:
    """Everything the agent has found on the host."""
    from controlplane.cli.client import Client

    client = Client()
    show_one(client.get(noun.path(client, ref=host, action="inventory")), output)


@app.command()
def remove(
    hosts: list[str],
    forget: Annotated[bool, typer.Option("--forget", help="Drop a host that is lost for good, without asking it.")] = False,
    yes: Yes = False,
    wait: Waiting = True,
    timeout: Timeout = "30m",
) -> None:
    """Take the agent off, leaving the host as it was."""
    from controlplane.cli.client import Client
    from controlplane.cli.wait import wait_for

    confirm(f"Remove {', '.join(hosts)}?", yes=yes)
    client = Client()
    for host in hosts:
        path = noun.path(client, ref=host)
        client.get(path)
        client.request("DELETE", path, parameters={"forget": "true" if forget else None})
        if wait:
            wait_for(client, client.operation_id, timeout=timeout)
        say(f"removed {host}" if wait else f"removing {host}")


def _login(place: str, **options: Any) -> dict[str, Any]:
    """The body's part that says how to log in. Raises CommandFailed."""
    user, _, rest = place.rpartition("@")
    address, port = _address(rest)
    identity: Path | None = options.pop("identity")
    body = {"address": address, "port": port, "user": user or "root", **options}
    if identity is not None:
        try:
            body["identity"] = sys.stdin.read() if str(identity) == "-" else identity.read_text()
        except (OSError, ValueError) as error:
            raise CommandFailed(f"cannot read {identity}", why=str(error), exit_code=Exit.USAGE) from error
    return {key: value for key, value in body.items() if value is not None}


def _address(text: str) -> tuple[str, int]:
    """HOST, HOST:PORT, [V6]:PORT or a bare IPv6 address. Raises CommandFailed."""
    host, port = text, "22"
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or "22"
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or not port.isdigit():
        raise CommandFailed(f"{text!r} is not HOST or HOST:PORT", exit_code=Exit.USAGE)
    return host, int(port)


def _preflight(client: Any, body: dict[str, Any], timeout: str) -> dict[str, Any]:
    from controlplane.cli.wait import wait_for

    asked = client.post("/v1/hosts/preflight", body)
    wait_for(client, client.operation_id, timeout=timeout)
    return client.get(f"/v1/hosts/preflights/{asked['id']}")


def _print_report(found: dict[str, Any]) -> None:
    report = found["report"]
    facts = report["facts"]
    print(f"{facts['hostname']}: {facts['os_id']} {facts['os_version']}, {facts['architecture']}")
    print(f"host key: {found['fingerprint']}")
    rows = [[_MARKS[check["result"]], check["name"], check["why"], check["fix"]] for check in report["checks"]]
    print_table(["", "CHECK", "FOUND", "DO"], rows)
    print(f"{len(found['changes'])} changes would be made (bedplate host add --dry-run lists them)")


def _print_changes(found: dict[str, Any], output: Format) -> None:
    """`--dry-run`: the list that the real run will carry out."""
    if not found["report"]["is_fit"]:
        _print_report(found)
        raise typer.Exit(Exit.FAILED)
    if output in {Format.JSON, Format.YAML}:
        show_one({"changes": found["changes"]}, output)
        return
    rows = [[change["action"], change["kind"], change["subject"], change["detail"]] for change in found["changes"]]
    print_table(["ACTION", "KIND", "SUBJECT", "DETAIL"], rows)


def _confirm_key(found: dict[str, Any], expected: str | None, *, yes: bool) -> None:
    """Nobody but a person can say whether the key is the host's: `--yes` does not, `--host-key-fingerprint` does."""
    del yes
    if expected is not None:
        return
    if not sys.stdin.isatty():
        raise CommandFailed(
            f"the host shows the key {found['fingerprint']}, and nobody is here to confirm it",
            hint="add --host-key-fingerprint with what ssh-keygen -lf prints on the host",
            exit_code=Exit.USAGE,
        )
    confirm(f"The host shows the key {found['fingerprint']}. Is that the host's key?", yes=False)


def _upload_artifacts(client: Any, directory: Path, *, yes: bool) -> None:
    """Every file in the directory that the deployment's list of artifacts knows by name, its digest confirmed."""
    known = {item["file"]: item for item in client.get("/v1/hosts/artifacts")["items"]}
    found = [path for path in sorted(directory.iterdir()) if path.name in known] if directory.is_dir() else []
    if not found:
        raise CommandFailed(f"{directory} holds none of: {', '.join(sorted(known))}", exit_code=Exit.USAGE)
    for path in found:
        item = known[path.name]
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest == item["sha256"]:
            continue
        if not item["expected_sha256"]:
            confirm(f"{path} has sha256 {digest}. Is that what {item['name']} {item['version']} should have?", yes=yes)
        say(f"uploading {path.name}")
        client.upload(f"/v1/hosts/artifacts/{item['name']}?sha256={digest}", path)
