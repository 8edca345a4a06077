"""The `bedplate` command: one sub-command per noun, found in `nouns/`, and the words that start processes.

The one rule: a noun is imported only when it is asked for or listed, so that every command starts quickly.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from importlib.metadata import version as installed_version

import typer

from controlplane.cli import nouns

app = typer.Typer(
    name="bedplate", no_args_is_help=True, pretty_exceptions_enable=False, help="A private cloud for AI inference."
)
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command()
def version() -> None:
    """Print the version of this program."""
    print(installed_version("bedplate"))


@app.command(context_settings=_PASS_ON, add_help_option=False)
def up(context: typer.Context) -> None:
    """Run the whole control plane on this machine."""
    _replace_by("controlplane.embedded.up", context.args)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def demo(context: typer.Context) -> None:
    """Show everything on this machine, with two lab hosts."""
    _replace_by("controlplane.embedded.demo", context.args)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def test() -> None:
    """Run the test suite (from a checkout: ./bedplate test)."""
    print("The tests are part of the source checkout, not of this package: run ./bedplate test there.", file=sys.stderr)
    raise typer.Exit(2)


def _replace_by(module: str, arguments: list[str]) -> None:
    """Become another program of ours; embedded programs are never imported here."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])  # noqa: S606 - constant program, no shell


def mount_nouns() -> None:
    for found in sorted(pkgutil.iter_modules(nouns.__path__), key=lambda module: module.name):
        module = importlib.import_module(f"{nouns.__name__}.{found.name}")
        app.add_typer(module.app, name=found.name.replace("_", "-"))


def main() -> None:
    mount_nouns()
    app()


if __name__ == "__main__":
    main()
