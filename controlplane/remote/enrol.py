"""Runs the agent's file on a host that has no agent yet: preflight, install, uninstall.

The one rule: the host itself checks the file's digest before it runs anything of it, and the file is gone afterwards
(what `install` wants to keep it copies to its place).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from controlplane.remote.link import HostUnreachable
from controlplane.remote.login import Login, Ran
from hostagent.protocol import codec
from hostagent.protocol.enrol import ChangeLine, InstallPlan, PreflightReport

PREFLIGHT_SECONDS = 120.0
INSTALL_SECONDS = 1200.0
EXIT_RECEIVE = 90

# Reads one JSON line {"sha256", "size_bytes", "plan", "arguments"} and the file from stdin, checks, runs, removes.
RECEIVE = """\
import hashlib, json, os, shutil, subprocess, sys, tempfile
def fail(code, message):
    sys.stderr.write(json.dumps({"code": code, "message": message}) + "\\n")
    raise SystemExit(90)
if sys.version_info < (3, 11):
    fail("host.python_too_old", "Python %d.%d, the agent needs 3.11" % sys.version_info[:2])
head = json.loads(sys.stdin.buffer.readline())
content = sys.stdin.buffer.read(head["size_bytes"])
if hashlib.sha256(content).hexdigest() != head["sha256"]:
    fail("host.upload_cut", "the agent's file arrived damaged: %d of %d bytes" % (len(content), head["size_bytes"]))
try:
    directory = tempfile.mkdtemp(prefix="bedplate-enrol-")
except OSError as error:
    fail("host.disk_full", "no temporary directory: %s" % error)
try:
    file, plan = os.path.join(directory, "agent.pyz"), os.path.join(directory, "plan.json")
    try:
        for path, data in ((file, content), (plan, head["plan"].encode())):
            with open(path, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
    except OSError as error:
        fail("host.disk_full", "the agent's file cannot be written: %s" % error)
    words = [plan if word == "{plan}" else word for word in head["arguments"]]
    code = subprocess.call([sys.executable, "-I", file, *words], stdin=subprocess.DEVNULL)
finally:
    shutil.rmtree(directory, ignore_errors=True)
raise SystemExit(code)
"""


class EnrolFailed(Exception):
    """The host said no; `code` is stable, the text is for an operator."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFile:
    """The agent as one file, named by its digest."""

    content: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


async def preflight(login: Login, file: AgentFile, plan: InstallPlan) -> PreflightReport:
    """Reads only. Raises EnrolFailed, HostUnreachable."""
    ran = await _run(login, file, plan, ["preflight", "--json", "--plan", "{plan}"], PREFLIGHT_SECONDS)
    try:
        return codec.decode(PreflightReport, json.loads(ran.stdout))
    except ValueError as error:
        raise EnrolFailed("host.preflight_unreadable", _said(ran) or str(error)) from error


async def plan_changes(login: Login, file: AgentFile, plan: InstallPlan) -> tuple[ChangeLine, ...]:
    """What `install` would change. Reads only."""
    ran = await _run(login, file, plan, ["install", "--dry-run", "--plan", "{plan}"], PREFLIGHT_SECONDS)
    return _lines(ran)


async def install(login: Login, file: AgentFile, plan: InstallPlan) -> tuple[ChangeLine, ...]:
    """Carries the plan out; a line that failed is the last. Twice is once."""
    return _lines(await _run(login, file, plan, ["install", "--plan", "{plan}"], INSTALL_SECONDS))


async def uninstall(login: Login, file: AgentFile) -> tuple[ChangeLine, ...]:
    """Undoes what `install` has done, as far as it had come."""
    return _lines(await _run(login, file, None, ["uninstall"], INSTALL_SECONDS))


async def _run(login: Login, file: AgentFile, plan: InstallPlan | None, arguments: list[str], seconds: float) -> Ran:
    head = {
        "sha256": file.sha256,
        "size_bytes": len(file.content),
        "plan": json.dumps(codec.encode(plan)) if plan else "",
        "arguments": arguments,
    }
    stdin = json.dumps(head).encode() + b"\n" + file.content
    ran = await login.run(["/usr/bin/python3", "-I", "-c", RECEIVE], stdin, deadline_seconds=seconds)
    if ran.exit_code == EXIT_RECEIVE:
        said = json.loads(ran.stderr.splitlines()[-1])
        raise EnrolFailed(str(said["code"]), str(said["message"]))
    if ran.exit_code == 127 or b"python3: not found" in ran.stderr or b"python3: No such file" in ran.stderr:
        raise EnrolFailed("host.python_missing", "the host has no /usr/bin/python3: apt-get install python3")
    if b"sudo:" in ran.stderr and ran.exit_code == 1 and not ran.stdout:
        raise EnrolFailed("host.sudo_refused", _said(ran))
    if ran.exit_code == 255 and not ran.stdout and not ran.stderr:
        raise HostUnreachable("", "the connection broke")
    return ran


def _lines(ran: Ran) -> tuple[ChangeLine, ...]:
    lines = []
    for line in ran.stdout.splitlines():
        try:
            lines.append(codec.decode(ChangeLine, json.loads(line)))
        except ValueError as error:
            raise EnrolFailed("host.install_unreadable", f"{line[:200]!r}: {error}") from error
    if ran.exit_code != 0 and not any(line.state == "failed" for line in lines):
        raise EnrolFailed("host.install_failed", _said(ran) or f"exit code {ran.exit_code}")
    return tuple(lines)


def _said(ran: Ran) -> str:
    return ran.stderr.decode(errors="replace").strip()[-1000:]
