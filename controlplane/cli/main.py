"""The `bedplate` command: one sub-command per noun, found in `nouns/`, others in `commands/`, and what starts processes.

The one rule: a noun is imported only when it is asked for or listed, so that every command starts quickly.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from itertools import takewhile
from pathlib import Path
from types import ModuleType

import typer

from controlplane.cli import commands, nouns
from controlplane.cli.errors import CommandFailed, Exit

app = typer.Typer(
    rich_markup_mode=None,
    name="bedplate",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="A private cloud for AI inference.",
)
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command()
def version() -> None:
    """Print the version of this program."""
    try:
        print(installed_version("bedplate"))
    except PackageNotFoundError:  # a checkout that is not installed
        print(tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["version"])


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


def mount(arguments: list[str]) -> None:
    """Mount the commands, and of the nouns the one that is asked for; all of them for help and completion."""
    for name in _modules(commands):
        _mount(commands.__name__, name)
    known = _modules(nouns)
    wanted = arguments[0].replace("-", "_") if arguments else ""
    for name in [wanted] if wanted in known else known:
        _mount(nouns.__name__, name)


@cache
def _mount(package: str, name: str) -> None:
    module = importlib.import_module(f"{package}.{name}")
    app.add_typer(module.app, name=name.replace("_", "-") if package == nouns.__name__ else None)


def _modules(package: ModuleType) -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def help_for(arguments: list[str]) -> str:
    """The command that lists the options of the one that was given: a noun and its verb are the first two words."""
    words = list(takewhile(lambda word: not word.startswith("-"), arguments[:2]))
    return " ".join(["bedplate", *words, "--help"])


def main() -> None:
    mount(sys.argv[1:])
    try:
        app(prog_name="bedplate")
    except CommandFailed as failure:
        if failure.code == "request.invalid" and not failure.hint:
            failure.hint = help_for(sys.argv[1:])
        failure.tell()
        sys.exit(failure.exit_code)
    except BrokenPipeError:  # `bedplate vm list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(Exit.FAILED)


if __name__ == "__main__":
    main()
