"""`bedplate operation`."""

from __future__ import annotations

from controlplane.cli.noun import Noun, Output, Timeout
from controlplane.cli.output import Format, show_one

noun = Noun(
    "operation",
    "operations",
    in_project=False,
    columns={"ID": "id", "ACTION": "action", "STATE": "state", "SUBJECT": "subject_id", "AGE": "created_at"},
    wide={"GENERATION": "subject_generation", "ACTOR": "actor", "CODE": "error_code", "WHY": "error_detail"},
    help="What changes are doing.",
)
app = noun.app
noun.add_list()
noun.add_show()


@app.command()
def wait(operation: str, timeout: Timeout = "30m", output: Output = Format.TABLE) -> None:
    """Wait until an operation has ended."""
    from controlplane.cli.client import Client
    from controlplane.cli.wait import wait_for

    ended = wait_for(Client(), operation, timeout=timeout)
    if ended is not None:
        show_one(ended, output)
