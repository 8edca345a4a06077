"""`bedplate storage-pool`."""

from __future__ import annotations

from controlplane.cli.noun import Noun

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
