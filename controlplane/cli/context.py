"""Which deployment, as whom, in which project: contexts in `~/.config/bedplate/config.toml`.

The one rule: the environment (`BEDPLATE_URL`, `BEDPLATE_TOKEN`, `BEDPLATE_PROJECT`, `BEDPLATE_CA`) wins over the file;
with neither, the operator token that `bedplate up` left on this machine is used.
"""

from __future__ import annotations

import contextlib
import json
import os
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from controlplane.cli.errors import CommandFailed, Exit
from controlplane.core.files import write_whole

DEFAULT_URL = "http://127.0.0.1:8700"
_KEYS = ("url", "token", "project", "ca")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One deployment as one user sees it; empty strings are not set."""

    name: str = ""
    url: str = ""
    token: str = ""
    project: str = ""
    ca: str = ""


@dataclass(slots=True, kw_only=True)
class Contexts:
    """The file's content."""

    path: Path
    current: str = ""
    by_name: dict[str, Context] = field(default_factory=dict)

    def save(self) -> None:
        """Write the file, 0600, whole or not at all."""
        lines = [f"current = {json.dumps(self.current)}"]
        for context in self.by_name.values():
            lines += ["", f"[contexts.{json.dumps(context.name)}]"]
            lines += [f"{key} = {json.dumps(value)}" for key in _KEYS if (value := getattr(context, key))]
        write_whole(self.path, ("\n".join(lines) + "\n").encode())

    def put(self, context: Context, *, is_current: bool = True) -> None:
        self.by_name[context.name] = context
        if is_current:
            self.current = context.name


def config_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "bedplate/config.toml"


def load() -> Contexts:
    """The contexts; none when there is no file. Raises CommandFailed when it cannot be read."""
    path = config_path()
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return Contexts(path=path)
    except (OSError, ValueError) as error:
        raise CommandFailed(f"cannot read {path}", why=str(error), exit_code=Exit.USAGE) from error
    contexts = Contexts(path=path, current=str(content.get("current", "")))
    for name, values in content.get("contexts", {}).items():
        contexts.by_name[name] = Context(name=name, **{key: str(values.get(key, "")) for key in _KEYS})
    return contexts


def state_directory() -> Path:
    """Where `bedplate up` of this user keeps its state."""
    given = os.environ.get("BEDPLATE_STATE_DIR")
    if given:
        return Path(given)
    return Path("/var/lib/bedplate") if os.geteuid() == 0 else Path.home() / ".local/state/bedplate"


def active() -> Context:
    """The context that commands use now. A token is never sent to another URL than the one that it was saved for."""
    contexts = load()
    chosen = contexts.by_name.get(contexts.current, Context())
    url = os.environ.get("BEDPLATE_URL", "")
    if url and url.rstrip("/") != chosen.url.rstrip("/"):
        chosen = Context(url=url)
    chosen = replace(
        chosen,
        url=(chosen.url or DEFAULT_URL).rstrip("/"),
        token=os.environ.get("BEDPLATE_TOKEN") or chosen.token,
        project=os.environ.get("BEDPLATE_PROJECT") or chosen.project,
        ca=os.environ.get("BEDPLATE_CA") or chosen.ca,
    )
    if not chosen.token and is_loopback(chosen.url):
        with contextlib.suppress(OSError):
            chosen = replace(chosen, token=(state_directory() / "operator-token").read_text().strip())
    return chosen


def is_loopback(url: str) -> bool:
    host = url.partition("://")[2].partition("/")[0]
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return name.strip("[]") in {"localhost", "::1"} or name.startswith("127.")
