"""Every command of every noun with what people get wrong: how it ends, and that it says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from controlplane.cli.main import app, mount
from tests.api.test_cli import api, bedplate, home, server_url

__all__ = ["api", "bedplate", "home", "server_url"]

_LOCAL = {"cert", "context"}  # they speak to no API
_OTHERS = {"up", "demo", "test"}  # they hand their arguments on


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its words."""

    def walk(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
        if hasattr(command, "commands"):
            for name, inner in command.commands.items():
                yield from walk((*words, name), inner)
        else:
            yield words, command

    mount(["--help"])
    yield from walk((), typer.main.get_command(app))


COMMANDS = {words: command for words, command in commands() if words[0] not in _OTHERS}
_PASSES_ON = ("vm", "ssh")  # what it does not know is for ssh


def takes(command: Any, option: str) -> bool:
    return any(option in one.opts for one in command.params)


def arguments(command: Any, value: str) -> list[str]:
    return [value for one in command.params if one.param_type_name == "argument" and one.required]


def check(ran: Any, words: Any, code: int, *said: str) -> None:
    """It ends with this code, prints no data, says these words and never a traceback."""
    assert (ran.code, ran.out) == (code, ""), (words, ran.err)
    for word in said:
        assert word in ran.err, (words, ran.err)
    assert "Traceback" not in ran.err, (words, ran.err)


def test_unknown_flags_and_missing_arguments_are_mistakes_of_usage(bedplate, home):
    for words, command in COMMANDS.items():
        if words != _PASSES_ON:
            check(bedplate(*words, "--no-such-flag"), words, 2, "--no-such-flag")
        if arguments(command, "x"):
            check(bedplate(*words), words, 2, "Missing argument")


def test_files_that_cannot_be_read(bedplate, api, tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: [unclosed")
    for words, command in COMMANDS.items():
        for file in (tmp_path / "none.yaml", broken) if takes(command, "--file") else ():
            project = ["--project", "ours"] if takes(command, "--project") else []
            check(bedplate(*words, *arguments(command, "x"), *project, "-f", str(file)), words, 2, file.name)


VERBS = {
    "show",
    "delete",
    "remove",
    "start",
    "stop",
    "restart",
    "drain",
    "undrain",
    "reboot",
    "revoke",
    "resize",
    "logs",
    "scale",
}


def test_what_is_not_there_ends_with_3_and_nothing_is_destroyed_without_a_yes(bedplate, api):
    bedplate("project", "create", "ours")
    tried = 0
    for words, command in COMMANDS.items():
        if words[0] in _LOCAL or words[-1] not in VERBS or not arguments(command, "x"):
            continue
        given = ["nothing", *arguments(command, "1")[1:]]
        options = ["--project", "ours"] if takes(command, "--project") else []
        options += ["--cpus", "1"] if words == ("vm", "resize") else []
        if takes(command, "--yes"):
            check(bedplate(*words, *given, *options), words, 2, "--yes")
            options.append("--yes")
        check(bedplate(*words, *given, *options), words, 3, "No such", "try:", "code:", "request:")
        tried += 1
    assert tried > 20


WRONG_VALUES = (
    ("vm create web --image none --network none --memory lots", 2, "lots"),
    ("vm create web --image none --network none --memory -5G", 2, "-5G"),
    ("vm create web --image none --network none --cpus 0", 2, "cpus"),
    ("vm create web --image none --network none", 2, "vm.image_unknown"),
    ("vm create web --image none --network none --ssh-key /nonexistent", 2, "/nonexistent"),
    ("network create back --cidr 300.0.0.0/8", 2, "ipv4_cidr"),
    ("network create back --cidr 192.168.7.0/24", 2, "network.cidr_outside_pool"),
    ("network create Back", 2, "/name"),
    ("network create -x", 2, "-x"),
    ("project create ours", 5, "project.name_taken"),
    ("vm list --limit 0", 2, "limit"),
    ("vm list --filter colour", 2, "filter"),
    ("vm list --sort colour", 2, "cannot sort"),
    ("operation wait op_01jd2x4k3fe8v9m2q7t5w0y6za --timeout 5", 2, "90s"),
    ("host preflight root@", 2, "HOST"),
    ("host preflight root@h:port", 2, "HOST"),
    ("image import /nonexistent", 2, "/nonexistent"),
    ("model show nothing", 3, "No such"),
    ("incident resolve inc_01jd2x4k3fe8v9m2q7t5w0y6za", 3, "No such"),
    ("vm list --project nothing", 3, "bedplate project list"),
)


def test_wrong_values(bedplate, api):
    bedplate("project", "create", "ours")
    for line, code, said in WRONG_VALUES:
        words = line.split()
        project = ["--project", "ours"] if words[0] in {"vm", "network"} and "--project" not in words else []
        check(bedplate(*words, *project), line, code, said)


def test_what_is_not_allowed_ends_with_4(bedplate, api, monkeypatch):
    bedplate("project", "create", "ours")
    made = bedplate("token", "create", "app", "--project", "ours", "-o", "json").json()
    monkeypatch.setenv("BEDPLATE_TOKEN", made["secret"])
    for line in ("host list", "token list", "project create other", "incident list"):
        ran = bedplate(*line.split())
        assert (ran.code, ran.out) == (4, ""), (line, ran.err)
    monkeypatch.setenv("BEDPLATE_TOKEN", "bp_wrong")
    ran = bedplate("project", "list")
    assert (ran.code, "bedplate login" in ran.err) == (4, True)
