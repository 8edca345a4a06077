"""`bedplate storage-pool`."""

from __future__ import annotations

from typing import Annotated

import typer

from controlplane.cli.noun import Noun, Output, Yes, confirm
from controlplane.cli.output import Format, show_one

noun = Noun(
    "storage-pool",
    "storage-pools",
    columns={
        "HOST": "host",
        "NAME": "name",
        "AVAILABLE": "is_available",
        "TOTAL": "total_bytes",
        "FREE": "free_bytes",
        "ALLOCATABLE": "allocatable_bytes",
    },
    wide={"ID": "id", "RESERVED": "reserved_bytes", "SEEN": "seen_at"},
    in_project=False,
    help="Where hosts keep volumes (operators).",
)
app = noun.app
noun.add_list()
noun.add_show()


@app.command()
def reclaim(
    pool: Annotated[str, typer.Argument(help="Id of the pool.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be freed, and what holds most.")] = False,
    yes: Yes = False,
    output: Output = Format.TABLE,
) -> None:
    """Make room: end deleted volumes whose data is only retained. Snapshots are named, and left alone."""
    from controlplane.cli.client import Client

    if not dry_run:
        confirm(f"Destroy the data of all volumes in {pool} that are only retained?", yes=yes)
    client = Client()
    show_one(client.post(noun.path(client, None, pool, "reclaim"), {"dry_run": dry_run}), output)
