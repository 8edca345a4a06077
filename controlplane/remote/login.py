"""The first login to a host: SSH as an operator would, with the host key pinned, for enrolment and nothing else.

The one rule: only `Login.run` sends anything, and what it runs is a constant program with its input on stdin.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import asyncssh

from controlplane.remote.link import HostKeyChanged, HostUnreachable

CONNECT_SECONDS = 15.0
KEEPALIVE_SECONDS = 10.0


class LoginRefused(Exception):
    """The host answers, but does not let this user in with this key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`fingerprint` (`SHA256:…`) is the only host key accepted. `identity` is a private key's text. `host_id` for errors."""

    host_id: str
    address: str
    port: int
    user: str
    identity: bytes
    fingerprint: str
    needs_sudo: bool = False
    jump: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    exit_code: int
    stdout: bytes
    stderr: bytes


class Login(Protocol):
    async def run(self, argv: list[str], stdin: bytes, *, deadline_seconds: float) -> Ran:
        """Raises HostUnreachable when the connection breaks or the deadline passes."""
        ...


class _PinnedClient(asyncssh.SSHClient):
    """Accepts exactly one host key, and remembers what it was shown instead."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.shown = ""

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        del host, addr, port
        self.shown = key.get_fingerprint()
        return self.shown == self.fingerprint


class _SshLogin:
    def __init__(self, target: Target, connection: asyncssh.SSHClientConnection) -> None:
        self._target = target
        self._connection = connection

    async def run(self, argv: list[str], stdin: bytes, *, deadline_seconds: float) -> Ran:
        command = shlex.join(["sudo", "-n", "--", *argv] if self._target.needs_sudo else argv)
        try:
            done = await asyncio.wait_for(
                self._connection.run(command, input=stdin, encoding=None, check=False), timeout=deadline_seconds
            )
        except TimeoutError:
            raise HostUnreachable(self._target.host_id, f"no end of {argv[0]} after {deadline_seconds:.0f} s") from None
        except (OSError, asyncssh.Error) as error:
            raise HostUnreachable(self._target.host_id, f"the connection broke: {error}") from error
        code = done.exit_status if done.exit_status is not None else 255
        return Ran(exit_code=code, stdout=_bytes(done.stdout), stderr=_bytes(done.stderr))


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value or "").encode()


async def learn_fingerprint(address: str, port: int, *, jump: str = "", host_id: str = "") -> str:
    """The fingerprint of the key that the host shows now; whether it is the right one only a person can say."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS), _jump(jump) as tunnel:
            key = await asyncssh.get_server_host_key(address, port, tunnel=tunnel, config=None)
    except TimeoutError:
        raise HostUnreachable(host_id, f"SSH at {address} port {port} does not answer") from None
    except (OSError, asyncssh.Error, ValueError) as error:  # ValueError: a name that no resolver can be asked for
        raise HostUnreachable(host_id, f"SSH at {address} port {port}: {_words(error)}") from error
    if key is None:
        raise HostUnreachable(host_id, f"SSH at {address} port {port} shows no key")
    return key.get_fingerprint()


@asynccontextmanager
async def open_login(target: Target) -> AsyncIterator[Login]:
    """Raises HostUnreachable, HostKeyChanged (nothing was sent), LoginRefused."""
    client = _PinnedClient(target.fingerprint)
    where = f"SSH at {target.address} port {target.port}"
    async with AsyncExitStack() as stack:
        connection = await _connected(target, client, where, stack)
        try:
            yield _SshLogin(target, connection)
        finally:
            connection.abort()
            await connection.wait_closed()


async def _connected(target: Target, client: _PinnedClient, where: str, stack: AsyncExitStack) -> asyncssh.SSHClientConnection:
    """The tunnel, if there is one, is closed by the stack, also when there was no getting through it."""
    try:
        key = asyncssh.import_private_key(target.identity)
        async with asyncio.timeout(CONNECT_SECONDS):
            return await asyncssh.connect(
                target.address,
                target.port,
                tunnel=await stack.enter_async_context(_jump(target.jump)),
                username=target.user,
                client_keys=[key],
                client_factory=lambda: client,
                known_hosts=asyncssh.import_known_hosts(""),
                agent_path=None,
                config=None,
                preferred_auth="publickey",
                keepalive_interval=KEEPALIVE_SECONDS,
            )
    except TimeoutError:
        raise HostUnreachable(target.host_id, f"{where} does not answer") from None
    except asyncssh.HostKeyNotVerifiable as error:
        raise HostKeyChanged(target.host_id, target.fingerprint, client.shown or "none") from error
    except asyncssh.PermissionDenied as error:
        raise LoginRefused(f"{where} does not let {target.user} in with this key") from error
    except (OSError, asyncssh.Error, ValueError) as error:
        raise HostUnreachable(target.host_id, f"{where}: {_words(error)}") from error


@asynccontextmanager
async def _jump(place: str) -> AsyncIterator[asyncssh.SSHClientConnection | None]:
    """A connection to go through, by the keys and known hosts of the worker's own user; None without a place."""
    if not place:
        yield None
        return
    user, _, rest = place.rpartition("@")
    host, _, port = rest.rpartition(":") if rest.count(":") == 1 else (rest, "", "")
    async with asyncssh.connect(host.strip("[]"), int(port or 22), username=user or ()) as connection:
        yield connection


def _words(error: BaseException) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "the connection is refused"
    return str(error).strip() or type(error).__name__
