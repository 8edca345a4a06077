"""Certificate files of a listener, followed while it runs.

The one rule: a new certificate is tried in a context of its own first, so a file that is half written never reaches the
listener; connections that stand keep what they began with.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 2.0


@dataclass(slots=True, kw_only=True)
class TlsFiles:
    """A certificate chain and its key, PEM. `context` is what the listener uses, for its whole life."""

    certificate: Path
    key: Path
    context: ssl.SSLContext = field(init=False)
    _seen: tuple[tuple[int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        """Raises OSError and ssl.SSLError when the files cannot be used."""
        self._seen = self._stamp()
        self.context = self._fresh()

    def _fresh(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certificate, self.key)
        return context

    def _stamp(self) -> tuple[tuple[int, int], ...]:
        stats = [path.stat() for path in (self.certificate, self.key)]
        return tuple((stat.st_mtime_ns, stat.st_ino) for stat in stats)

    def refresh(self) -> bool:
        """Take the files in when they have changed and fit together; True when new connections get a new certificate."""
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return False
            self._fresh()
            self.context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            _log.warning("keeping the old certificate, because %s cannot be used: %s", self.certificate, error)
            return False
        self._seen = stamp
        _log.info("took in the certificate %s", self.certificate)
        return True

    async def follow(self) -> None:
        """Refresh every two seconds until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self.refresh()
