"""The listeners of API and gateway: their sockets and certificates.

The one rule: plain HTTP is for loopback; elsewhere it must be asked for, and is said.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal

from controlplane.core.tls import TlsFiles
from controlplane.settings import ApiSettings, GatewaySettings, Settings, TlsSettings

_log = logging.getLogger("bedplate.listener")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_BACKLOG = 2048

Face = Literal["api", "gateway"]
_WORDS: dict[Face, tuple[str, str]] = {"api": ("the API", "tokens"), "gateway": ("the gateway", "keys")}


class ListenerRefused(RuntimeError):
    """The process may not or cannot listen as it is told; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A socket that listens, and the certificate it shows; None: plain HTTP."""

    socket: socket.socket
    tls: TlsFiles | None

    @property
    def url(self) -> str:
        host, port = self.socket.getsockname()[:2]
        return f"{'https' if self.tls else 'http'}://{host if ':' not in host else f'[{host}]'}:{port}"

    @property
    def context_factory(self) -> Callable[..., ssl.SSLContext] | None:
        """What uvicorn asks for its context."""
        tls = self.tls
        return None if tls is None else lambda *_: tls.context

    @contextlib.asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Meanwhile a renewed certificate is taken in."""
        following = None if self.tls is None else asyncio.create_task(self.tls.follow(), name="certificate")
        try:
            yield
        finally:
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)


def open_listener(settings: Settings, face: Face) -> Listener:
    """The listener of a face of this deployment. Raises ListenerRefused."""
    refuse_plain_http(settings, face)
    own = _of(settings, face)
    shown = settings.tls_of(own.tls)
    if shown is not own.tls:
        _ensure_placeholder(settings)
    return Listener(tls=tls_files(shown), socket=bind(own.listen))


def _ensure_placeholder(settings: Settings) -> None:
    """Until the authority has answered, the listener shows a certificate that nobody trusts."""
    from controlplane.certificate.store import Store

    try:
        Store(settings.acme_directory).ensure_placeholder(list(settings.tls.acme.domains))
    except OSError as error:
        raise ListenerRefused(f"cannot write to {settings.acme_directory}: {error.strerror}") from error


def bind(listen: str) -> socket.socket:
    """A listening socket for `host:port`; port 0 takes any free one. Raises ListenerRefused."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not port.isdigit() or int(port) > 65535:
        raise ListenerRefused(f"cannot listen on {listen}: a port is a number from 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, int(port)), family=family, backlog=_BACKLOG)
    except OSError as error:
        words = str(error.strerror).partition(" (while ")[0]  # the library repeats the address there
        raise ListenerRefused(f"cannot listen on {listen}: {words}") from error


def tls_files(settings: TlsSettings) -> TlsFiles | None:
    """The certificate files; None without. Raises ListenerRefused when they cannot be used."""
    if settings.certificate is None or settings.key is None:
        if settings.certificate is not settings.key:
            raise ListenerRefused("TLS needs both a certificate and a key")
        return None
    try:
        return TlsFiles(certificate=settings.certificate, key=settings.key)
    except (OSError, ssl.SSLError) as error:
        raise ListenerRefused(f"cannot use the certificate {settings.certificate}: {error}") from error


def refuse_plain_http(settings: Settings, face: Face) -> None:
    """Raises ListenerRefused for plain HTTP on other addresses than loopback, unless it was asked for."""
    own, (name, secrets) = _of(settings, face), _WORDS[face]
    host = own.listen.rpartition(":")[0].strip("[]")
    if settings.tls_of(own.tls).certificate is not None or host in _LOOPBACK:
        return
    if not settings.insecure_http:
        raise ListenerRefused(
            f"{name} would speak plain HTTP on {host or 'every address'}: "
            "set a certificate (bedplate cert init makes one, ACME fetches one), or BEDPLATE_INSECURE_HTTP=1"
        )
    _log.warning("%s speaks plain HTTP on %s: whoever listens there can read the %s", name, host or "every address", secrets)


def _of(settings: Settings, face: Face) -> ApiSettings | GatewaySettings:
    return settings.api if face == "api" else settings.gateway
