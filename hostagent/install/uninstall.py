"""Taking the agent off a host. The one rule: what the manifest names is undone, newest first, and nothing else is touched.

Machines, links, routes and mounts of the agent's that still exist are ended first. The login user and its key go last: as
long as they exist the removal is not finished, and it may be run again.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hostagent.drivers.network.links import is_of
from hostagent.drivers.network.routes import PROTOCOL_ROUTES, RouteRecord
from hostagent.install.accounts import remove_user
from hostagent.install.commands import APT_SECONDS, CommandFailed, command
from hostagent.install.install import Manifest
from hostagent.install.layout import SYSTEMD_UNIT, Layout
from hostagent.install.steps import hang_up, remove_tree, service_kind, sysctl_path
from hostagent.lib import files
from hostagent.lib.paths import Paths
from hostagent.protocol.enrol import Change, ChangeLine
from hostagent.protocol.errors import AgentError

LINK = re.compile(r"bp[0-9a-z]{12}|bw[ab][0-9a-f]{8}")
_LEAVING = re.compile(r"^(?:Purg|Remv) (\S+)", re.MULTILINE)
ROUTE_PROTOCOL = str(PROTOCOL_ROUTES)  # those of links go with them
_STOP_SECONDS = 30.0


def uninstall(paths: Paths, *, is_dry_run: bool, can_wait: bool = True) -> Iterator[ChangeLine]:
    """One at a time. Who cannot wait leaves it to the other: once that is done, the host may be enrolled anew at any moment."""
    layout = Layout(paths=paths, digest="")
    if is_dry_run:
        entries = ordered(Manifest(layout.manifest).entries, paths.state)
        yield from (ChangeLine(change=_change(entry), state="planned") for entry in entries)
        return
    descriptor = os.open(paths.run.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # a file would be left behind
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if can_wait else fcntl.LOCK_NB))
        yield from _undo_all(layout)
    except BlockingIOError:
        return
    finally:
        os.close(descriptor)


def _undo_all(layout: Layout) -> Iterator[ChangeLine]:
    paths = layout.paths
    entries = ordered(Manifest(layout.manifest).entries, paths.state)
    kind = service_kind(layout)
    stop_all(kind, paths)
    ours = frozenset(entry["subject"] for entry in entries if entry["kind"] == "package")
    remove_together(ours)
    for entry in entries:
        try:
            kept = remove_package(entry["subject"], ours) if entry["kind"] == "package" else ""
            undo(entry, kind, layout)
        except (OSError, CommandFailed, AgentError) as error:
            yield ChangeLine(change=_change(entry), state="failed", message=str(error))
            return
        yield ChangeLine(change=_change(entry), state="done", message=kept)
    for directory in (paths.programs, paths.log, paths.state):
        empty(directory)
    remove_tree(paths.run)


def empty(directory: Path) -> None:
    """What the agent made in a directory that was there before it; the directory stays."""
    for entry in directory.iterdir() if directory.is_dir() else ():
        if entry.is_dir() and not entry.is_symlink():
            remove_tree(entry)
        else:
            entry.unlink()


def ordered(entries: list[dict[str, Any]], state: Path) -> list[dict[str, Any]]:
    """Newest first; directories after what they hold; then the user; last the state directory with the manifest in it."""

    def rank(entry: dict[str, Any]) -> int:
        if Path(entry["subject"]).is_relative_to(state):
            return 3
        return {"directory": 1, "user": 2}.get(entry["kind"], 0)

    newest = entries[::-1]
    return sorted(newest, key=rank)


def undo(entry: dict[str, Any], kind: str, layout: Layout) -> None:
    """One change of the manifest. Undone already is success."""
    path, before = Path(entry["subject"]), entry["before"]
    match entry["kind"]:
        case "user":
            remove_user(layout)
        case "directory":
            remove_tree(path)
        case "file" if "content" in before:
            files.write_atomically(path, base64.b64decode(before["content"]), mode=0o644)
        case "file" | "link":
            path.unlink(missing_ok=True)
        case "sysctl":
            with contextlib.suppress(FileNotFoundError):
                sysctl_path(str(path)).write_text(before["value"], encoding="ascii")
        case "unit" if kind == "systemd":
            command("systemctl", "daemon-reload")
        case _:
            return


def remove_together(ours: frozenset[str]) -> None:
    """All in one go, which is the rule and many times faster; where that is not possible each is looked at by itself."""
    present = sorted(name for name in ours if _is_present(name))
    if not present:
        return
    with contextlib.suppress(CommandFailed):
        simulated = command("apt-get", "purge", "--simulate", "--yes", *present, seconds=APT_SECONDS)
        if set(_LEAVING.findall(simulated)) <= ours:
            command("apt-get", "purge", "--yes", *present, seconds=APT_SECONDS)


def _is_present(name: str) -> bool:
    shown = command("dpkg-query", "--show", "--showformat=${db:Status-Status}", name, check=False)
    return shown not in ("", "not-installed")


def remove_package(name: str, ours: frozenset[str]) -> str:
    """Why it stays, "" when it is gone: what somebody installed since and needs it must not go with it."""
    if not _is_present(name):
        return ""
    simulated = command("apt-get", "purge", "--simulate", "--yes", name, seconds=APT_SECONDS)
    others = sorted(set(_LEAVING.findall(simulated)) - ours - {name})
    if others:
        return f"kept: {', '.join(others)} would go with it"
    command("apt-get", "purge", "--yes", name, seconds=APT_SECONDS)
    return ""


def stop_all(kind: str, paths: Paths) -> None:
    """The agent first, so that it starts nothing again; then all that ran under it."""
    if kind == "systemd":
        command("systemctl", "disable", "--quiet", "--now", SYSTEMD_UNIT, check=False)
        command("systemctl", "stop", "bedplate.slice", check=False)
        command("systemctl", "reset-failed", "bedplate-*", check=False)
    else:
        units = paths.config / "units.d"
        for name in ("bedplate-agent", "bedplate-supervisor"):
            (units / f"{name}.json").unlink(missing_ok=True)
            hang_up()
            _wait_until_gone(name.removeprefix("bedplate-"))
    remove_network(paths)
    _unmount(paths)


def remove_network(paths: Paths) -> None:
    """Links, routes and rules of this agent. Another agent's in the same network namespace stay, and with them the table."""
    owner = paths.owner()
    links = {link["ifname"]: link.get("ifalias", "") for link in json.loads(command("ip", "-json", "link"))}
    all_agents = {name for name in links if LINK.fullmatch(name)}
    ours = {name for name in all_agents if _is_ours(name, links[name], owner)}
    for name in sorted(ours):
        command("ip", "link", "delete", name, check=False)
    destinations = RouteRecord(paths.routes).read()
    for destination in sorted(destinations or ()):
        family = "-6" if ":" in destination else "-4"
        command("ip", family, "route", "delete", destination, "proto", ROUTE_PROTOCOL, check=False)
    left = [command("ip", family, "route", "show", "proto", ROUTE_PROTOCOL, check=False) for family in ("-4", "-6")]
    if all_agents == ours and not any(left):
        for family in ("inet", "arp"):
            command("nft", "delete", "table", family, "bedplate", check=False)


def _is_ours(name: str, alias: str, owner: str) -> bool:
    """A tunnel by its name, a machine's link by its alias; the peer of a veth goes with its link."""
    return name.endswith(owner) if name.startswith("bw") else is_of(owner, alias)


def _wait_until_gone(face: str) -> None:
    """Pid 1 stops units in its own time: wait until no process runs this face of the agent."""
    argument = {"agent": b"serve", "supervisor": b"supervisor"}[face]
    deadline = time.monotonic() + _STOP_SECONDS
    while time.monotonic() < deadline:
        if not any(_is_face(entry, argument) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
            return
        time.sleep(0.05)
    raise CommandFailed(f"the agent's {face} did not stop within {_STOP_SECONDS:g} s")


def _is_face(entry: Path, argument: bytes) -> bool:
    try:
        argv = (entry / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return len(argv) > 3 and argv[2].endswith(b"/agent.pyz") and argv[3] == argument


def _unmount(paths: Paths) -> None:
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    ours = (f"{paths.state}/", f"{paths.run}/")
    for mount in reversed(mounts):
        if mount.startswith(ours):
            command("umount", "--lazy", mount, check=False)


def detach(paths: Paths, archive: Path) -> None:
    """Start the removal outside the agent, from a copy of its file, and return at once. The copy deletes itself."""
    directory = Path(tempfile.mkdtemp(prefix="bedplate-uninstall-", dir="/run"))
    copy = directory / "agent.pyz"
    shutil.copyfile(archive, copy)
    argv = [sys.executable, "-I", str(copy), "uninstall", "--delete-copy"]
    if service_kind(Layout(paths=paths, digest="")) == "systemd":
        command("systemd-run", "--quiet", "--collect", "--unit=bedplate-uninstall", *argv)
        return
    with (directory / "log").open("wb") as log:
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/")


def _change(entry: dict[str, Any]) -> Change:
    action = "change" if entry["before"].get("content") or entry["kind"] == "sysctl" else "remove"
    return Change(kind=entry["kind"], subject=entry["subject"], action=action, detail=entry["detail"])
