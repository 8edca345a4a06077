"""`bedplate operation`."""

from __future__ import annotations

from typing import Any

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


@app.command()
def show(operation: str, output: Output = Format.TABLE) -> None:
    """Show one operation with the steps it went through."""
    from controlplane.cli.client import Client

    client = Client()
    _print(client.get(noun.path(client, ref=operation)), output)


@app.command()
def wait(operation: str, timeout: Timeout = "30m", output: Output = Format.TABLE) -> None:
    """Wait until an operation has ended."""
    from controlplane.cli.client import Client
    from controlplane.cli.wait import wait_for

    ended = wait_for(Client(), operation, timeout=timeout)
    if ended is not None:
        _print(ended, output)


def _print(operation: dict[str, Any], output: Format) -> None:
    if output not in {Format.TABLE, Format.WIDE}:
        show_one(operation, output)
        return
    from controlplane.cli.wait import step_line

    show_one({name: value for name, value in operation.items() if name != "steps"}, output)
    if operation["steps"]:
        print("steps")
    for step in operation["steps"]:
        print(step_line(step))
