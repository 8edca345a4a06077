"""Units under systemd: transient services made by systemd-run, found again by name.

The one rule: a unit's end is decided by the verbs, so nothing is restarted here, and `RemainAfterExit` keeps the way it ended
until the unit is removed. Source: systemd-run(1), systemd.exec(5), systemd.resource-control(5), systemd 252 and later.
"""

from __future__ import annotations

import os

from hostagent.drivers.supervisor.protocol import Limit, SupervisorTraits, UnitObserved, UnitRendered, UnitWanted
from hostagent.lib.process import incarnation_of
from hostagent.lib.program import run
from hostagent.protocol.errors import AgentError

PREFIX = "bedplate-"
SUFFIX = ".service"
PROPERTIES = ("LoadState", "ActiveState", "SubState", "MainPID", "ExecMainPID", "ExecMainCode", "ExecMainStatus")
CLD_EXITED = 1
START_SECONDS = 30.0
STOP_MARGIN_SECONDS = 15.0
LONGEST_GRACE_SECONDS = 600.0


class SystemdSupervisor:
    """`limits`: those of `cpu`, `memory`, `cpuset`, `tasks` whose cgroup v2 controllers systemd has."""

    def __init__(self, limits: frozenset[Limit] = frozenset({"cpu", "memory", "cpuset", "tasks"})) -> None:
        self.traits = SupervisorTraits(name="systemd", limits=limits)

    def render(self, wanted: UnitWanted) -> UnitRendered:
        argv = [
            "systemd-run",
            "--quiet",
            f"--unit={PREFIX}{wanted.name}{SUFFIX}",
            "--service-type=exec",
            "--slice=bedplate.slice",
        ]
        argv += [f"--property={name}={value}" for name, value in _properties(wanted)]
        argv += [f"--setenv={name}={value}" for name, value in wanted.env.items()]
        # systemd expands $ in a unit's words; doubled it stands for itself
        return UnitRendered(argv=(*argv, "--", *(word.replace("$", "$$") for word in (*_rights(wanted), *wanted.argv))))

    async def observe(self, name: str) -> UnitObserved | None:
        finished = await run("systemctl", "show", f"--property={','.join(PROPERTIES)}", PREFIX + name + SUFFIX)
        return observed_from(name, finished.stdout.decode())

    async def apply(self, wanted: UnitWanted) -> UnitObserved:
        observed = await self.observe(wanted.name)
        if observed is not None and observed.state == "running":
            return observed
        if observed is not None:
            await self.remove(wanted.name)
        if not os.access(wanted.argv[0], os.X_OK):
            raise AgentError("supervisor.start_failed", f"{wanted.name}: there is no {wanted.argv[0]}", retryable=False)
        wanted.log_path.parent.mkdir(parents=True, exist_ok=True)  # systemd makes the file, not the directory (209/STDOUT)
        finished = await run(*self.render(wanted).argv, deadline_seconds=START_SECONDS, check=False)
        if finished.returncode:
            shown = await run("systemctl", "show", "--property=Result,ExecMainStatus", PREFIX + wanted.name + SUFFIX)
            await self.remove(wanted.name)
            words = (finished.stderr + shown.stdout).decode(errors="replace").split()
            raise AgentError("supervisor.start_failed", f"{wanted.name}: {' '.join(words)}")
        observed = await self.observe(wanted.name)
        if observed is None:
            raise AgentError("supervisor.start_failed", f"{wanted.name} is gone as soon as it was started")
        return observed

    async def remove(self, name: str) -> None:
        unit = PREFIX + name + SUFFIX
        await run("systemctl", "stop", unit, deadline_seconds=LONGEST_GRACE_SECONDS + STOP_MARGIN_SECONDS, check=False)
        await run("systemctl", "reset-failed", unit, check=False)

    async def names(self) -> tuple[str, ...]:
        finished = await run("systemctl", "list-units", "--all", "--plain", "--no-legend", f"{PREFIX}*{SUFFIX}")
        units = (line.split(maxsplit=1)[0] for line in finished.stdout.decode().splitlines() if line.strip())
        return tuple(unit.removeprefix(PREFIX).removesuffix(SUFFIX) for unit in units if _is_transient(unit))


def _is_transient(unit: str) -> bool:
    """The agent's own services carry the same prefix but none of the separators of an object's unit."""
    return "_" in unit


def observed_from(name: str, shown: str) -> UnitObserved | None:
    """From the lines of `systemctl show`; None when systemd knows no such unit."""
    values = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    if values.get("LoadState") == "not-found" or values.get("ActiveState") == "inactive":
        return None
    pid = int(values.get("MainPID") or 0)
    incarnation = incarnation_of(pid) if pid else None
    if incarnation is not None:
        return UnitObserved(name=name, state="running", incarnation=incarnation)
    status = int(values.get("ExecMainStatus") or 0)
    is_exit = int(values.get("ExecMainCode") or 0) == CLD_EXITED
    return UnitObserved(
        name=name,
        state="exited",
        incarnation=None,
        exit_code=status if is_exit else None,
        exit_signal=None if is_exit or not status else status,
    )


def _rights(wanted: UnitWanted) -> tuple[str, ...]:
    """Numbers without a name in the user database: systemd refuses them (217/USER), setpriv of util-linux takes them."""
    if not wanted.uid and not wanted.gid:
        return ()
    groups = f"--groups={','.join(str(group) for group in wanted.groups)}" if wanted.groups else "--clear-groups"
    return ("/usr/bin/setpriv", f"--reuid={wanted.uid}", f"--regid={wanted.gid}", groups, "--inh-caps=-all", "--")


def _properties(wanted: UnitWanted) -> list[tuple[str, str]]:
    limits = wanted.limits
    properties = [
        ("RemainAfterExit", "yes"),
        ("WorkingDirectory", str(wanted.directory)),
        ("StandardInput", "null"),
        ("StandardOutput", f"append:{wanted.log_path}"),
        ("StandardError", f"append:{wanted.log_path}"),
        ("KillSignal", wanted.stop_signal),
        ("TimeoutStopSec", f"{wanted.stop_grace_seconds:g}s"),
        ("NoNewPrivileges", "yes" if wanted.uid else ""),
        ("LimitCORE", "0"),
        ("LimitNOFILE", str(limits.open_files)),
        ("LimitMEMLOCK", "" if limits.locked_memory_bytes is None else str(limits.locked_memory_bytes)),
        ("CPUQuota", "" if limits.cpu_cores is None else f"{limits.cpu_cores * 100:g}%"),
        ("MemoryMax", "" if limits.memory_bytes is None else str(limits.memory_bytes)),
        ("AllowedCPUs", " ".join(str(cpu) for cpu in limits.cpus)),
        ("TasksMax", "" if limits.tasks is None else str(limits.tasks)),
    ]
    return [(name, value) for name, value in properties if value]
