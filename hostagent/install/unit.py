"""Starting our own service under systemd. The one rule: what does not come up in time says why."""

from __future__ import annotations

from hostagent.install.commands import SECONDS, CommandFailed, command

_LOOK_SECONDS = 20.0
_PROPERTIES = "ActiveState,SubState,Result,ExecMainStatus,NRestarts"


def restart(unit: str, *, seconds: float = SECONDS) -> None:
    """Start it anew and wait until it says that it serves (`Type=notify`).

    Raises CommandFailed with what systemd knows of it and its own last words; it may go on trying then.
    """
    try:
        command("systemctl", "restart", unit, seconds=seconds)
    except CommandFailed as failure:
        raise CommandFailed(f"{str(failure).splitlines()[0]}; {_words_of(unit)}") from None


def _words_of(unit: str) -> str:
    known = _look("systemctl", "show", f"--property={_PROPERTIES}", unit)
    said = _look("journalctl", f"--unit={unit}", "--lines=5", "--output=cat", "--no-pager", "--quiet")
    return f"{' '.join(known.split())}; its last words: {said.strip() or 'none'}"


def _look(*argv: str) -> str:
    try:
        return command(*argv, seconds=_LOOK_SECONDS, check=False)
    except CommandFailed as failure:
        return str(failure)
