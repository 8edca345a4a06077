"""The steps from what a host is to a host with the agent. The one rule: only what differs becomes a step.

A step's `before` is what `uninstall` needs to put back; it is on disk before the step acts.
"""

from __future__ import annotations

import base64
import os
import pwd
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from hostagent.facts.system import processor_flags
from hostagent.facts.system import supervisor as found_supervisor
from hostagent.install.accounts import add_user
from hostagent.install.commands import APT_SECONDS, CommandFailed, command, succeeds
from hostagent.install.layout import (
    FORWARDING,
    MODULES_FILE,
    SYSCTL_FILE,
    SYSTEMD_DIRECTORY,
    SYSTEMD_UNIT,
    USER,
    Layout,
    host_toml,
    modules_text,
    sysctl_text,
)
from hostagent.install.unit import restart
from hostagent.lib import files, hostconfig
from hostagent.protocol.enrol import Change, InstallPlan

_KEY = re.compile(r"(ssh-ed25519|ecdsa-sha2-nistp256|ssh-rsa) [A-Za-z0-9+/=]{40,2000}( [\x20-\x7e]*)?")
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+")
_SIMULATED = re.compile(r"^Inst (\S+)", re.MULTILINE)


class PlanRefused(ValueError):
    """The plan is not one that may be carried out; nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    change: Change
    act: Callable[[], None]
    before: dict[str, str] = field(default_factory=dict)


def steps(plan: InstallPlan, layout: Layout, content: bytes) -> list[Step]:
    """In the order in which they are carried out. Reads the host, changes nothing."""
    if not _KEY.fullmatch(plan.authorized_key.strip()):
        raise PlanRefused("the authorized key is not one SSH public key")
    if not all(_PACKAGE.fullmatch(name) for name in (*plan.packages, *plan.fallbacks)):
        raise PlanRefused("a package name is not one")
    found = [*_directories(layout), *_packages(plan), *_user(layout), *_agent(layout, content)]
    found += _text(layout.authorized_keys, layout.authorized_keys_text(plan.authorized_key))
    if plan.config and not layout.paths.host_config.exists():
        found += _text(layout.paths.host_config, host_toml(plan.config))
    found += [*_sysctls(), *_modules(layout), *_tables(layout)]
    return [*found, *_service(layout, is_new_version=bool(_link(layout)))]


def before_anything(layout: Layout) -> None:
    """Raises CommandFailed when the service could not be started at the end, so that nothing is changed for nothing."""
    if service_kind(layout) != "systemd" and not reads_units():
        raise CommandFailed("pid 1 is neither systemd nor one that starts what stands in /etc/bedplate/units.d")


def _packages(plan: InstallPlan) -> list[Step]:
    """Also those that come along, as apt itself says: they are marked as ours and leave with us."""
    fallbacks = [name for name, kind in plan.fallbacks.items() if not _has_link_kind(kind)]
    missing = [name for name in (*plan.packages, *fallbacks) if not _is_installed(name)]
    if not missing:
        return []
    names = list(dict.fromkeys(_SIMULATED.findall(_simulated(missing)))) or missing

    def install() -> None:
        argv = ("apt-get", "install", "--yes", "--no-install-recommends", *missing)
        try:
            command(*argv, seconds=APT_SECONDS)
        except CommandFailed:  # lists that are missing, or older than what the mirror has
            command("apt-get", "update", seconds=APT_SECONDS)
            command(*argv, seconds=APT_SECONDS)

    detail = {name: "wanted" if name in missing else "comes along" for name in names}
    first = Step(change=Change(kind="package", subject=names[0], detail=detail[names[0]]), act=install)
    others = [Step(change=Change(kind="package", subject=name, detail=detail[name]), act=_nothing) for name in names[1:]]
    return [first, *others]


def _has_link_kind(kind: str) -> bool:
    """Tried where it leaves nothing."""
    return succeeds("unshare", "-n", "ip", "link", "add", "bp0", "type", kind)


def _simulated(missing: list[str]) -> str:
    """What apt says it would do. A fresh server often has no lists: they are then read into a place of their own, because a
    dry run changes nothing.
    """
    argv = ("install", "--simulate", "--yes", "--no-install-recommends", *missing)
    try:
        return command("apt-get", *argv, seconds=APT_SECONDS)
    except CommandFailed:
        with tempfile.TemporaryDirectory(prefix="bedplate-apt-") as lists:
            options = ("-o", f"Dir::State::Lists={lists}", "-o", "APT::Sandbox::User=root")
            command("apt-get", *options, "update", seconds=APT_SECONDS)
            return command("apt-get", *options, *argv, seconds=APT_SECONDS)


def _is_installed(name: str) -> bool:
    return command("dpkg-query", "--show", "--showformat=${db:Status-Status}", name, check=False) == "installed"


def _directories(layout: Layout) -> list[Step]:
    paths = layout.paths
    wanted = [paths.state, paths.config, paths.log, paths.programs, paths.programs / "agent", layout.version_directory]
    wanted += [layout.home, layout.home / ".ssh"]
    if service_kind(layout) == "plain":
        wanted.append(paths.config / "units.d")

    def make(path: Path) -> Callable[[], None]:
        def act() -> None:
            path.mkdir(mode=0o755)
            path.chmod(0o755)

        return act

    return [Step(change=Change(kind="directory", subject=str(path)), act=make(path)) for path in wanted if not path.is_dir()]


def _user(layout: Layout) -> list[Step]:
    try:
        pwd.getpwnam(USER)
    except KeyError:
        pass
    else:
        return []
    detail = "logs in with the control plane's key only"
    return [Step(change=Change(kind="user", subject=USER, detail=detail), act=lambda: add_user(layout))]


def _agent(layout: Layout, content: bytes) -> list[Step]:
    found: list[Step] = []
    if not layout.file.exists() or layout.file.read_bytes() != content:
        change = Change(kind="file", subject=str(layout.file), detail="the agent")
        found.append(Step(change=change, act=lambda: files.write_atomically(layout.file, content, mode=0o755)))
    return [*found, *_link(layout)]


def _link(layout: Layout) -> list[Step]:
    target = str(layout.current.readlink()) if layout.current.is_symlink() else ""
    if target == layout.digest:
        return []

    def act() -> None:
        fresh = layout.current.with_name(".current.new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(layout.digest)
        fresh.rename(layout.current)

    action = "change" if target else "create"
    change = Change(kind="link", subject=str(layout.current), action=action, detail=f"to {layout.digest[:16]}")
    return [Step(change=change, act=act, before={"target": target})]


def _text(path: Path, text: str, *, mode: int = 0o644) -> list[Step]:
    old = path.read_bytes() if path.is_file() else None
    if old == text.encode():
        return []
    before = {} if old is None else {"content": base64.b64encode(old).decode()}
    change = Change(kind="file", subject=str(path), action="create" if old is None else "change")
    return [Step(change=change, act=lambda: files.write_atomically(path, text.encode(), mode=mode), before=before)]


def _sysctls() -> list[Step]:
    """Machines are routed, so the host forwards; a host that learns its own default route keeps doing so (accept_ra=2)."""
    wanted = dict(FORWARDING)
    for line in command("ip", "-6", "route", "show", "default", "proto", "ra", check=False).splitlines():
        words = line.split()
        if "dev" in words:
            wanted[f"net.ipv6.conf.{words[words.index('dev') + 1]}.accept_ra"] = "2"
    found = _text(SYSCTL_FILE, sysctl_text(wanted))
    for name, value in wanted.items():
        path = sysctl_path(name)
        old = path.read_text(encoding="ascii").strip() if path.exists() else value
        if old != value:
            change = Change(kind="sysctl", subject=name, action="change", detail=f"{old} to {value}")
            found.append(Step(change=change, act=_writer(path, value), before={"value": old}))
    return found


def _modules(layout: Layout) -> list[Step]:
    """Only systemd reads the file. What is not a module here, or is loaded already, is no failure."""
    if service_kind(layout) != "systemd":
        return []
    wanted = modules_text(processor_flags())
    found = _text(MODULES_FILE, wanted)
    return [
        replace(step, act=_then(step.act, lambda: command("modprobe", "--all", "--quiet", *wanted.split(), check=False)))
        for step in found
    ]


def _then(first: Callable[[], None], second: Callable[[], object]) -> Callable[[], None]:
    def act() -> None:
        first()
        second()

    return act


def _tables(layout: Layout) -> list[Step]:
    """Written by the agent when first a document wants rules, and named here because the host gets them."""
    if layout.current.is_symlink():
        return []
    detail = "written by the agent when machines are filtered"
    return [
        Step(change=Change(kind="nft_table", subject=name, detail=detail), act=_nothing)
        for name in ("inet bedplate", "arp bedplate")
    ]


def sysctl_path(name: str) -> Path:
    """Interface names may hold dots, so only the outer parts are split."""
    head, _, last = name.rpartition(".")
    return Path("/proc/sys") / "/".join(head.split(".", 3)) / last


def service_kind(layout: Layout) -> str:
    return hostconfig.load(layout.paths.host_config).supervisor or found_supervisor()


def _service(layout: Layout, *, is_new_version: bool) -> list[Step]:
    if service_kind(layout) == "systemd":
        return list(_systemd(layout, is_new_version=is_new_version))
    written = [step for path, text in layout.plain_units().items() for step in _text(path, text)]
    names = [Path(step.change.subject).stem for step in written]
    units = [Step(change=Change(kind="unit", subject=name, detail="started by pid 1"), act=_nothing) for name in names]
    if units:
        units[-1] = Step(change=units[-1].change, act=hang_up)
    return [*written, *units]


def _systemd(layout: Layout, *, is_new_version: bool) -> Iterator[Step]:
    text = _text(SYSTEMD_DIRECTORY / SYSTEMD_UNIT, layout.systemd_text())
    yield from text
    is_enabled = succeeds("systemctl", "is-enabled", "--quiet", SYSTEMD_UNIT)
    is_active = succeeds("systemctl", "is-active", "--quiet", SYSTEMD_UNIT)
    if not text and is_enabled and is_active and not is_new_version:
        return

    def act() -> None:
        command("systemctl", "daemon-reload")
        command("systemctl", "enable", "--quiet", SYSTEMD_UNIT)
        restart(SYSTEMD_UNIT)

    action = "change" if is_enabled else "create"
    yield Step(change=Change(kind="unit", subject=SYSTEMD_UNIT, action=action, detail="enabled and started"), act=act)


def hang_up() -> None:
    """Tell pid 1 to read its units again. Raises CommandFailed where it is not one that does: others end at SIGHUP."""
    if not reads_units():
        raise CommandFailed("pid 1 is neither systemd nor one that starts what stands in /etc/bedplate/units.d")
    os.kill(1, signal.SIGHUP)


def reads_units() -> bool:
    """Whether pid 1 names the units' directory in its own program, as the lab's init does."""
    for argument in Path("/proc/1/cmdline").read_bytes().split(b"\0"):
        path = Path(os.fsdecode(argument))
        if path.suffix == ".py" and path.is_file():
            return b"/etc/bedplate/units.d" in path.read_bytes()
    return False


def _writer(path: Path, text: str) -> Callable[[], None]:
    def act() -> None:
        path.write_text(text, encoding="ascii")

    return act


def _nothing() -> None:
    """Done by an earlier step of the same kind."""


def remove_tree(path: Path) -> None:
    """Absent is success; a mount point in the way is an error of its own words."""
    if path.exists():
        shutil.rmtree(path)
