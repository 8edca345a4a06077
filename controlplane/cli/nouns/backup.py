"""`bedplate backup`: on the control plane's machine, with its settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from controlplane.cli.errors import CommandFailed, Exit
from controlplane.cli.noun import Output
from controlplane.cli.output import Format, show_one

_PROGRAM = "controlplane.backup"  # run, not imported: this is a client

app = typer.Typer(rich_markup_mode=None, name="backup", no_args_is_help=True, help="Back up and restore the control plane.")

State = Annotated[Path | None, typer.Option("--state", help="State directory, as of `bedplate up`.")]
PassphraseFile = Annotated[
    Path | None, typer.Option("--passphrase-file", help="File with the passphrase of the keys file; - is stdin.")
]


@app.command()
def create(
    output: Annotated[Path | None, typer.Option("--output-file", help="File or directory; default: here, by date.")] = None,
    keys: Annotated[Path | None, typer.Option("--keys", help="Where the keys go; default: beside it, with .keys.")] = None,
    no_keys: Annotated[bool, typer.Option("--no-keys", help="Write no keys file: the master key is kept elsewhere.")] = False,
    passphrase_file: PassphraseFile = None,
    state: State = None,
    form: Output = Format.TABLE,
) -> None:
    """Write the database to one file and the keys to another, also while everything runs."""
    options = {"--output": output, "--keys": keys, "--passphrase-file": passphrase_file, "--state": state}
    run("create", options, ["--no-keys"] if no_keys else [], form)


@app.command()
def restore(
    archive: Annotated[Path, typer.Argument(help="The file that `backup create` wrote.")],
    keys: Annotated[
        Path | None, typer.Option("--keys", help="Its keys file; default: beside it, else this machine's key.")
    ] = None,
    passphrase_file: PassphraseFile = None,
    state: State = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check that the files open and fit together.")] = False,
    form: Output = Format.TABLE,
) -> None:
    """Restore to a fresh state directory (or an empty database); hosts then refuse the control plane that was backed up."""
    options = {"--keys": keys, "--passphrase-file": passphrase_file, "--state": state}
    run("restore", options, [str(archive), *(["--dry-run"] if dry_run else [])], form)


def run(verb: str, options: dict[str, Path | None], more: list[str], form: Format, what: str = "") -> None:
    """The program, with the words of `what` where it fails."""
    what = what or f"backup {verb}"
    given = [text for name, value in options.items() if value is not None for text in (name, str(value))]
    sys.stdout.flush()
    done = subprocess.run(
        [sys.executable, "-P", "-m", _PROGRAM, verb, *given, *more],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        codes = {Exit.USAGE.value: Exit.USAGE, Exit.CONFLICT.value: Exit.CONFLICT}
        words = done.stderr.strip() or f"it ended with {done.returncode}"
        raise CommandFailed(f"{what} failed", why=words, exit_code=codes.get(done.returncode, Exit.FAILED))
    print(done.stderr, end="", file=sys.stderr, flush=True)
    show_one(json.loads(done.stdout), form)
