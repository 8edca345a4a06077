"""Keeps the ACME certificate of this machine's listeners fresh: looks once a minute, renews in a process of its own.

The one rule: a failure is shown (incident, log, metric) and tried again by the schedule; the API serves on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import asyncpg
from prometheus_client import CollectorRegistry, Gauge
from sqlalchemy.exc import SQLAlchemyError

from controlplane.certificate import schedule
from controlplane.certificate.store import Store
from controlplane.core.clock import Clock, SystemClock
from controlplane.kernel.database import Database
from controlplane.kernel.incident import open_incident, resolve_incident
from controlplane.settings import Settings

_log = logging.getLogger("bedplate.certificate")
_LOOK_SECONDS = 60.0
_RENEWAL_SECONDS = 300.0
CODE = "certificate.renewal_failing"
SUBJECT = "certificate"


@dataclass(slots=True, kw_only=True)
class CertificateKeeper:
    settings: Settings
    database: Database
    clock: Clock = field(default_factory=SystemClock)
    registry: CollectorRegistry | None = None
    look_seconds: float = _LOOK_SECONDS
    _ends: Gauge = field(init=False)
    _shown_failures: int | None = None  # what the incident says; None: not known yet

    def __post_init__(self) -> None:
        self._ends = Gauge(
            "bedplate_certificate_not_after_seconds", "When the ACME certificate ends, as UNIX time.", registry=self.registry
        )

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Keep it fresh meanwhile; without names to fetch a certificate for, nothing happens."""
        keeping = asyncio.create_task(self._run(), name="acme") if self.settings.tls.acme.domains else None
        try:
            yield
        finally:
            if keeping is not None:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except (OSError, ValueError, SQLAlchemyError, asyncpg.PostgresError, asyncpg.InterfaceError):
                _log.exception("the certificate was not looked after")
            await asyncio.sleep(self.look_seconds)

    async def look(self) -> None:
        """Renew if it is due, and show how it stands."""
        acme, store = self.settings.tls.acme, Store(self.settings.acme_directory)
        now = self.clock.now()
        due = schedule.due(acme, store.held(), store.record(), now)
        if due.at <= now:
            _log.info("fetching a certificate for %s, because %s", ", ".join(acme.domains), due.why)
            await self._renew()
        if (held := store.held()) is not None:
            self._ends.set(held.not_after.timestamp())
        record = store.record()
        if record.failures != self._shown_failures:
            await self._show(record)

    async def _renew(self) -> None:
        """Run it to its end. It writes down itself how it went; what it says goes to our log."""
        argv = (sys.executable, "-P", "-m", "controlplane.certificate", "renew")
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(_RENEWAL_SECONDS):
                _, said = await process.communicate()
            level = logging.INFO if process.returncode == 0 else logging.WARNING
            _log.log(level, "%s", " ".join(said.decode(errors="replace").split()))
        except TimeoutError:
            _log.warning("the renewal did not end within %.0f s", _RENEWAL_SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _show(self, record: schedule.Record) -> None:
        async with self.database.session() as session:
            if record.failures:
                names = ", ".join(self.settings.tls.acme.domains)
                detail = f"no certificate for {names}: {record.last_error}; the next try is at {record.next_try_at}"
                await open_incident(session, CODE, SUBJECT, detail, {"failures": record.failures})
            else:
                await resolve_incident(session, CODE, SUBJECT)
        self._shown_failures = record.failures
