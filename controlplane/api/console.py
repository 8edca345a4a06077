"""The web console's built pages, pure ASGI before the application. The one rule: whatever a page may load is of this origin.

Pages are asked for by browsers (GET with `Accept: text/html`) at any address that is not the API's own; files of a build carry
their digest in their name and may be kept for ever.
"""

from __future__ import annotations

import mimetypes
import secrets
from pathlib import Path

from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

BUILT = Path(__file__).parents[1] / "console" / "dist"
"""Where `./bedplate` builds it; without it `/` is a plain page that says so."""

_OURS = frozenset({"v1", "healthz", "readyz", "metrics", "openapi.json", "docs"})
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'nonce-{nonce}'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_NONCE = "__NONCE__"
"""In the built page; each answer has a nonce of its own, for the one style element that the widgets make."""
_HEADERS = {
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


class Console:
    """Answers what belongs to the console, and hands on everything else."""

    def __init__(self, app: ASGIApp, *, directory: Path = BUILT) -> None:
        self._app = app
        self._files: dict[str, Path] = {}
        if (directory / "index.html").is_file():
            self._files = {f"/{path.relative_to(directory)}": path for path in directory.rglob("*") if path.is_file()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer(scope) if self._files and scope["type"] == "http" else None
        await (answer or self._app)(scope, receive, send)

    def _answer(self, scope: Scope) -> Response | None:
        path: str = scope["path"]
        if scope["method"] not in {"GET", "HEAD"} or path.split("/")[1] in _OURS:
            return None
        found = self._files.get(path)
        if found is not None and path != "/index.html":
            is_kept = path.startswith("/assets/")
            kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
            caching = "public, max-age=31536000, immutable" if is_kept else "no-cache"
            return FileResponse(found, media_type=kind, headers={**_HEADERS, "cache-control": caching})
        accepts = next((value for name, value in scope["headers"] if name == b"accept"), b"")
        if b"text/html" not in accepts:
            return None
        return self._page()

    def _page(self) -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = _POLICY.format(nonce=nonce)
        page = self._files["/index.html"].read_text().replace(_NONCE, nonce)
        return HTMLResponse(page, headers={**_HEADERS, "content-security-policy": policy, "cache-control": "no-store"})
