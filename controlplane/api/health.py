"""What a process shows without a token: liveness, readiness, metrics, and a plain page at `/`."""

from __future__ import annotations

import contextlib
from html import escape

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy import text
from starlette.responses import HTMLResponse, JSONResponse, Response

from controlplane.api.call import Services
from controlplane.core.errors import Unavailable, catalogue
from controlplane.kernel import exposition
from controlplane.resources.storage_pool import queries as storage_pools

router = APIRouter(include_in_schema=False)

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Bedplate</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 40rem; margin: 4rem auto; padding: 0 1rem }
code { background: #8882; padding: .1em .3em }
</style>
<h1>Bedplate</h1>
<p>This control plane is running. Its console is not built here (<code>./bedplate</code> builds it):
use the command line or the API.</p>
<ul>
<li><a href="/openapi.json">OpenAPI document</a> of everything under <code>/v1</code></li>
<li><a href="/docs/errors">Errors</a> and what to do about them</li>
<li><a href="/healthz">/healthz</a>, <a href="/readyz">/readyz</a>, <a href="/metrics">/metrics</a></li>
<li>Command line: <code>bedplate login</code>, then <code>bedplate vm list</code></li>
</ul>
</html>
"""

_ERRORS = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Errors of the Bedplate API</title>
<h1>Errors</h1>
<dl>{rows}</dl>
</html>
"""
_HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}


@router.get("/")
async def front() -> Response:
    return HTMLResponse(_PAGE, headers=_HEADERS)


@router.get("/docs/errors")
async def errors() -> Response:
    """What the `type` of a problem points to."""
    rows = "".join(
        f"<dt id='{escape(kind.code)}'><code>{escape(kind.code)}</code> {kind.status} {escape(kind.title)}</dt>"
        f"<dd>{escape(' '.join((kind.__doc__ or '').split()))}</dd>"
        for kind in catalogue()
    )
    return HTMLResponse(_ERRORS.format(rows=rows), headers=_HEADERS)


@router.get("/healthz")
async def healthz() -> Response:
    """The process answers."""
    return JSONResponse({"status": "ok"})


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """The process can do its work: the database answers."""
    services: Services = request.app.state.services
    try:
        async with services.database.sessionmaker() as session:
            await session.execute(text("SELECT 1"))
    except Exception as error:
        raise Unavailable("the database does not answer") from error
    return JSONResponse({"status": "ready"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Of this process, and of the workers and watches on this machine."""
    services: Services = request.app.state.services
    content = await exposition.gather(services.settings.state_dir, request.app.state.registry)
    with contextlib.suppress(Exception):  # the database is away: then what it knows is not shown
        async with services.database.sessionmaker() as session:
            content += (await storage_pools.metrics_text(session)).encode()
    return Response(content, media_type=CONTENT_TYPE_LATEST)
