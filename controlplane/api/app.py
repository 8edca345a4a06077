"""The API application: every `controlplane/resources/<noun>/routes.py` is found and mounted, nothing is listed.

The one rule: this process cannot reach a host; `guard` refuses the import of anything that could.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import pkgutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from prometheus_client import CollectorRegistry
from starlette.middleware import Middleware

from controlplane import resources
from controlplane.api import health, problems
from controlplane.api.call import Database, Services
from controlplane.api.console import Console
from controlplane.api.middleware import Ring
from controlplane.api.openapi import document
from controlplane.core.clock import Clock, SystemClock
from controlplane.core.sealing import Sealer
from controlplane.events.feed import EventFeed
from controlplane.identity.oidc import provider_of
from controlplane.placement.explain import REJECTIONS
from controlplane.settings import Settings


def routers() -> list[APIRouter]:
    """The router of every noun, in the order of their names."""
    found: list[APIRouter] = []
    for package in pkgutil.iter_modules(resources.__path__):
        name = f"controlplane.resources.{package.name}.routes"
        if importlib.util.find_spec(name) is not None:
            found.append(importlib.import_module(name).router)
    return found


def _services(settings: Settings, database: Database, sealer: Sealer, clock: Clock) -> Services:
    return Services(
        settings=settings,
        database=database,
        sealer=sealer,
        clock=clock,
        events=EventFeed(database),
        oidc=provider_of(settings.oidc),
    )


def create_app(
    settings: Settings,
    database: Database,
    *,
    sealer: Sealer,
    clock: Clock | None = None,
) -> FastAPI:
    """The application; the caller owns `database` and closes it afterwards."""
    registry = CollectorRegistry()
    registry.register(REJECTIONS)
    services = _services(settings, database, sealer, clock or SystemClock())
    feed = services.events

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        del app
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(feed.run())
            yield
            await feed.close()
            running.cancel()

    app = FastAPI(
        title="Bedplate",
        version="1",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
        middleware=[Middleware(Ring, max_body_bytes=settings.api.max_body_bytes, registry=registry), Middleware(Console)],
    )
    app.state.services = services
    app.state.registry = registry
    problems.install(app)
    for router in (*routers(), health.router):  # including it would build each of its routes again for this application
        app.router.routes.extend(router.routes)
    app.openapi = lambda: document(app)
    return app
