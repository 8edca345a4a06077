"""What a demo stands on: a control plane of its own and a lab, in one directory.

The one rule: closing leaves no process behind; what is on disk stays for a look until `--clean`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import pwd
import secrets
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from controlplane.embedded.client import Api
from controlplane.embedded.postgres import SYSTEM_USER
from controlplane.embedded.services import answers, base_environment, python
from controlplane.embedded.timeline import Timeline
from controlplane.settings import Settings, TlsSettings
from provisioning.lab.lab import Lab
from provisioning.lab.model import HostSpec

_UP_SECONDS = 180
_DOWN_SECONDS = 90
HOSTS = ("lab1", "lab2")
GATEWAY = "gateway"


class StageFailed(RuntimeError):
    """Something the demo stands on did not come up; the message says what."""


@dataclass(slots=True)
class Stage:
    directory: Path
    timeline: Timeline
    settings: Settings = field(default_factory=Settings)
    lab: Lab | None = None
    _api: Api | None = None
    _up: asyncio.subprocess.Process | None = None
    _api_listen: str = ""
    _gateway_listen: str = ""

    @property
    def state_directory(self) -> Path:
        return self.directory / "state"

    @property
    def log_directory(self) -> Path:
        return self.state_directory / "logs"

    @property
    def token_file(self) -> Path:
        return self.state_directory / "operator-token"

    @property
    def api_url(self) -> str:
        return f"http://{self._api_listen}"

    @property
    def gateway_url(self) -> str:
        return f"http://{self._gateway_listen}"

    @property
    def api(self) -> Api:
        if self._api is None:
            raise StageFailed("the control plane is not up yet")
        return self._api

    def environment(self) -> dict[str, str]:
        """Of our programs: nothing of a real deployment's settings, so that a demo never touches its database."""
        kept = {name: value for name, value in base_environment().items() if not name.startswith("BEDPLATE_")}
        kept["BEDPLATE_CONFIG"] = str(self.directory / "no-config.toml")
        if self.settings.apt_mirror:
            kept["BEDPLATE_APT_MIRROR"] = self.settings.apt_mirror
        if self.settings.cache_dir is not None:
            kept["BEDPLATE_CACHE_DIR"] = str(self.settings.cache_dir)
        return kept

    async def start_control_plane(self) -> None:
        """`bedplate up` on a state directory of our own, on free ports; returns when it is ready."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o711)
        try:
            pwd.getpwnam(SYSTEM_USER)
        except KeyError:
            (self.directory / "made-account").touch()  # what a demo made goes with it
        self._api_listen = _free("127.0.0.1:8700")
        self._gateway_listen = _free("127.0.0.1:8800")
        with (self.directory / "up.log").open("wb") as log:
            self._up = await asyncio.create_subprocess_exec(
                "setpriv",
                "--pdeathsig",
                "INT",
                "--",
                *python("controlplane.embedded.up"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self.environment()
                | {
                    "BEDPLATE_STATE_DIR": str(self.state_directory),
                    "BEDPLATE_API__LISTEN": self._api_listen,
                    "BEDPLATE_GATEWAY__LISTEN": self._gateway_listen,
                    "BEDPLATE_NETWORK__IPV4_POOL": _free_pool(),
                    "BEDPLATE_NETWORK__TUNNEL_PORT": str(_free_ports()),
                },
            )
        is_ready = answers(self._api_listen, TlsSettings(), "/readyz")
        deadline = time.monotonic() + _UP_SECONDS
        while not (await is_ready() and self.token_file.exists()):
            if self._up.returncode is not None or time.monotonic() > deadline:
                raise StageFailed(f"the control plane did not come up:\n{_tail(self.directory / 'up.log')}")
            await asyncio.sleep(0.1)
        self._api = Api(self.api_url, self.token_file.read_text().strip())

    async def start_lab(self) -> Lab:
        """Two hosts, and the gateway's host in this machine's own network namespace."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o711)
        specs = [HostSpec(name=name, cores=2, memory_bytes=4 << 30) for name in HOSTS]
        specs.append(HostSpec(name=GATEWAY, kind="gateway", cores=1, memory_bytes=1 << 30))
        lab = Lab("demo", self.directory / "lab", tuple(specs))
        self.lab = lab
        await asyncio.to_thread(lab.up)
        return lab

    async def close(self) -> None:
        """Stop the control plane, then cut the power of the lab hosts."""
        if self._api is not None:
            await self._api.close()
        if self._up is not None and self._up.returncode is None:
            self._up.send_signal(signal.SIGINT)
            try:
                async with asyncio.timeout(_DOWN_SECONDS):
                    await self._up.wait()
            except TimeoutError:
                print("the control plane did not stop in time; killing it", file=sys.stderr)
                with contextlib.suppress(ProcessLookupError):
                    self._up.kill()
                await self._up.wait()
        if self.lab is not None:
            for host in self.lab.hosts:
                await asyncio.to_thread(host.stop)


def _free_pool() -> str:
    """A /16 for private networks that this machine has no route into: the gateway's host adds routes to its machines here."""
    listed = subprocess.run(["ip", "-j", "-4", "route", "show", "table", "all"], check=True, capture_output=True).stdout
    taken = [ipaddress.IPv4Network(route["dst"]) for route in json.loads(listed) if route["dst"] != "default"]
    pools = [ipaddress.IPv4Network(f"10.{number}.0.0/16") for number in range(128, 255)]
    free = [pool for pool in pools if not any(pool.overlaps(network) for network in taken)]
    if not free:
        raise StageFailed("this machine has routes into all of 10.128.0.0/9; the demo finds no addresses of its own")
    return str(secrets.choice(free))


def _free(listen: str) -> str:
    """The address itself when its port is free, else the same address with a free port."""
    host, _, port = listen.rpartition(":")
    for candidate in (int(port), 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, candidate))
            return f"{host}:{probe.getsockname()[1]}"
    raise StageFailed(f"no port is free on {host}")


def _free_ports() -> int:
    """The first of two UDP ports for tunnels: the gateway's host listens at them in this machine's own namespace."""
    for first in (51820, *range(52000, 60000, 2)):
        with (
            contextlib.suppress(OSError),
            socket.socket(type=socket.SOCK_DGRAM) as one,
            socket.socket(type=socket.SOCK_DGRAM) as two,
        ):
            one.bind(("0.0.0.0", first))
            two.bind(("0.0.0.0", first + 1))
            return first
    raise StageFailed("no two UDP ports are free for tunnels")


def _tail(path: Path, lines: int = 15) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
