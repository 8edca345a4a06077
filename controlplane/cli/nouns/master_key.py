"""`bedplate master-key`: on the control plane's machine, with its settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from controlplane.cli.noun import Output
from controlplane.cli.nouns.backup import State, run
from controlplane.cli.output import Format

app = typer.Typer(
    rich_markup_mode=None, name="master-key", no_args_is_help=True, help="The key over all secrets of the control plane."
)


@app.callback()
def callback() -> None:
    """The key over all secrets of the control plane."""


@app.command()
def rotate(
    new_key: Annotated[
        Path | None, typer.Option("--new-key", help="File with the new key (32 bytes); default: one is made.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would be sealed anew.")] = False,
    state: State = None,
    form: Output = Format.TABLE,
) -> None:
    """Seal every secret anew under a new master key, while the control plane is stopped; run it again where it was cut."""
    options = {"--new-key": new_key, "--state": state}
    run("rotate", options, ["--dry-run"] if dry_run else [], form, "master-key rotate")
