"""`bedplate volume`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from controlplane.cli import spec
from controlplane.cli.errors import CommandFailed, Exit
from controlplane.cli.noun import File, InProject, LabelOptions, Noun, Output, Timeout, Waiting
from controlplane.cli.output import Format
from controlplane.cli.size import parse_bytes

noun = Noun(
    "volume",
    "volumes",
    columns={"NAME": "name", "STATUS": "status", "SIZE": "size_bytes", "VM": "vm", "POOL": "pool", "AGE": "created_at"},
    wide={"ID": "id", "HOST": "observed.host", "ENCRYPTED": "observed.is_encrypted", "ROOT": "is_root", "LABELS": "labels"},
    help="Encrypted disks.",
)
app = noun.app
noun.add_list()
noun.add_show()
noun.add_delete()

Protect = Annotated[bool | None, typer.Option("--protect/--unprotect", help="Whether deletion is refused.")]
Iops = Annotated[int | None, typer.Option(help="Requests a second; 0: no limit.")]
Bandwidth = Annotated[str | None, typer.Option(help="Bytes a second, like 200M; 0: no limit.")]
BurstIops = Annotated[int | None, typer.Option(help="Requests a second during a burst.")]
BurstBandwidth = Annotated[str | None, typer.Option(help="Bytes a second during a burst.")]
BurstSeconds = Annotated[int | None, typer.Option(help="Longest burst.")]
Retention = Annotated[int | None, typer.Option("--retention-hours", help="How long data is kept after a deletion.")]
NumQueues = Annotated[int | None, typer.Option(help="Queues between machine and storage.")]
QueueSize = Annotated[int | None, typer.Option(help="Requests a queue holds: a power of two, 32 to 1024.")]


def _limits(
    iops: int | None, bandwidth: str | None, burst_iops: int | None, burst_bandwidth: str | None, burst_seconds: int | None
) -> dict[str, Any] | None:
    given = {
        "iops": iops,
        "bytes_per_second": parse_bytes(bandwidth, "--bandwidth"),
        "burst_iops": burst_iops,
        "burst_bytes_per_second": parse_bytes(burst_bandwidth, "--burst-bandwidth"),
        "burst_seconds": burst_seconds,
    }
    return {name: value for name, value in given.items() if value is not None} or None


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="A DNS label.")] = None,
    size: Annotated[str | None, typer.Option(help="Size, like 10G; default: what image or snapshot needs.")] = None,
    image: Annotated[str | None, typer.Option(help="Begin as this image.")] = None,
    snapshot: Annotated[str | None, typer.Option(help="Begin as this snapshot: a clone.")] = None,
    vm: Annotated[str | None, typer.Option(help="Attach it to this VM at once.")] = None,
    pool: Annotated[str | None, typer.Option(help="Storage pool; default: primary.")] = None,
    host: Annotated[str | None, typer.Option(help="Exactly this host (operators).")] = None,
    unlock: Annotated[str | None, typer.Option(help="Who opens it after a reboot: host (default) or control_plane.")] = None,
    iops: Iops = None,
    bandwidth: Bandwidth = None,
    burst_iops: BurstIops = None,
    burst_bandwidth: BurstBandwidth = None,
    burst_seconds: BurstSeconds = None,
    num_queues: NumQueues = None,
    queue_size: QueueSize = None,
    retention_hours: Retention = None,
    protect: Protect = None,
    label: LabelOptions = None,
    file: File = None,
    project: InProject = None,
    output: Output = Format.TABLE,
    wait: Waiting = True,
    timeout: Timeout = "30m",
) -> None:
    """Make a volume, encrypted under a key of its own."""
    options: dict[str, Any] = {
        "name": name,
        "size_bytes": parse_bytes(size, "--size"),
        "image": image,
        "snapshot": snapshot,
        "vm": vm,
        "pool": pool,
        "host": host,
        "unlock": unlock,
        "limits": _limits(iops, bandwidth, burst_iops, burst_bandwidth, burst_seconds),
        "num_queues": num_queues,
        "queue_size": queue_size,
        "retention_hours": retention_hours,
        "is_protected": protect,
        "labels": spec.pairs(label),
    }
    noun.create(spec.merged(file, options), project=project, output=output, wait=wait, timeout=timeout)


@app.command()
def update(
    volume: str,
    iops: Iops = None,
    bandwidth: Bandwidth = None,
    burst_iops: BurstIops = None,
    burst_bandwidth: BurstBandwidth = None,
    burst_seconds: BurstSeconds = None,
    num_queues: NumQueues = None,
    queue_size: QueueSize = None,
    retention_hours: Retention = None,
    protect: Protect = None,
    description: Annotated[str | None, typer.Option(help="For people.")] = None,
    label: LabelOptions = None,
    file: File = None,
    project: InProject = None,
    output: Output = Format.TABLE,
    wait: Waiting = True,
    timeout: Timeout = "30m",
) -> None:
    """Change what is given. Of limits, those that are left out are lifted."""
    options: dict[str, Any] = {
        "limits": _limits(iops, bandwidth, burst_iops, burst_bandwidth, burst_seconds),
        "num_queues": num_queues,
        "queue_size": queue_size,
        "retention_hours": retention_hours,
        "is_protected": protect,
        "description": description,
        "labels": spec.pairs(label),
    }
    noun.act(volume, body=spec.merged(file, options), project=project, output=output, wait=wait, timeout=timeout)


@app.command()
def attach(
    volume: str,
    vm: str,
    delete_with_vm: Annotated[bool, typer.Option("--delete-with-vm", help="It goes when the VM is deleted.")] = False,
    project: InProject = None,
    output: Output = Format.TABLE,
    wait: Waiting = True,
    timeout: Timeout = "30m",
) -> None:
    """Put a volume into a VM of its host."""
    body = {"vm": vm, "delete_with_vm": delete_with_vm}
    noun.act(volume, "attach", body, project=project, output=output, wait=wait, timeout=timeout)


@app.command()
def detach(
    volume: str, project: InProject = None, output: Output = Format.TABLE, wait: Waiting = True, timeout: Timeout = "30m"
) -> None:
    """Take a volume out of its VM; unmount it there first."""
    noun.act(volume, "detach", project=project, output=output, wait=wait, timeout=timeout)


@app.command()
def grow(
    volume: str,
    size: Annotated[str, typer.Argument(help="The new size, like 20G.")],
    project: InProject = None,
    output: Output = Format.TABLE,
    wait: Waiting = True,
    timeout: Timeout = "30m",
) -> None:
    """Make a volume larger; `takes_effect` says when a running VM sees it."""
    size_bytes = parse_bytes(size, "SIZE")
    if size_bytes is None:
        raise CommandFailed("no size is given", exit_code=Exit.USAGE)
    noun.act(volume, "grow", {"size_bytes": size_bytes}, project=project, output=output, wait=wait, timeout=timeout)


@app.command()
def snapshot(
    volume: str,
    name: Annotated[str, typer.Argument(help="Name of the snapshot.")],
    project: InProject = None,
    output: Output = Format.TABLE,
    wait: Waiting = True,
    timeout: Timeout = "30m",
) -> None:
    """Take a snapshot of a volume; its machine goes on running."""
    from controlplane.cli.nouns.snapshot import noun as snapshots

    snapshots.create({"name": name, "volume": volume}, project=project, output=output, wait=wait, timeout=timeout)


@app.command()
def restore(
    volume: str, project: InProject = None, output: Output = Format.TABLE, wait: Waiting = True, timeout: Timeout = "30m"
) -> None:
    """Bring a deleted volume back while its data is retained."""
    noun.act(volume, "restore", project=project, output=output, wait=wait, timeout=timeout)
