"""The HTTP client of every command.

The one rule: what is sent may be sent again. Every POST carries an Idempotency-Key, so a request that was cut is repeated.
"""

from __future__ import annotations

import os
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2

from controlplane.cli.context import Context, active, is_loopback
from controlplane.cli.errors import CommandFailed, Exit, from_problem

_TRIES = 4
_CHUNK_BYTES = 1 << 20
_FIRST_PAUSE_SECONDS = 0.3
_CONNECT_SECONDS = 5.0
_READ_SECONDS = 75.0  # longer than the longest long poll


class Client:
    """Speaks to the API of a context. `operation_id` is the operation that the last change started."""

    def __init__(self, context: Context | None = None) -> None:
        self.context = context or active()
        self.operation_id: str | None = None
        if self.context.token:
            refuse_plain(self.context.url)
        headers = {"authorization": f"Bearer {self.context.token}"} if self.context.token else {}
        timeout = httpx2.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)
        try:
            self._http = httpx2.Client(
                base_url=self.context.url, headers=headers, timeout=timeout, verify=_verification(self.context), trust_env=False
            )
        except (OSError, ValueError) as error:
            raise CommandFailed(f"cannot use {self.context.url}", why=str(error), exit_code=Exit.USAGE) from error
        weakref.finalize(self, self._http.close)

    def get(self, path: str, **parameters: Any) -> Any:
        return self.request("GET", path, parameters=parameters)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self.request("POST", path, body=dict(body or {}))

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        return self.request("PATCH", path, body=body)

    def delete(self, path: str) -> Any:
        return self.request("DELETE", path)

    def upload(self, path: str, file: Path) -> Any:
        """PUT the bytes of a file, streamed. Raises CommandFailed."""

        def chunks() -> Iterator[bytes]:
            with file.open("rb") as content:
                while chunk := content.read(_CHUNK_BYTES):
                    yield chunk

        try:
            headers = {"content-type": "application/octet-stream", "content-length": str(file.stat().st_size)}
            answer = self._http.put(
                path, content=chunks(), headers=headers, timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS)
            )
        except OSError as error:
            raise CommandFailed(f"cannot read {file}", why=str(error), exit_code=Exit.USAGE) from error
        except httpx2.TransportError as error:
            raise self._unreachable(error) from error
        if answer.is_success:
            return answer.json()
        raise self.failure(answer, path)

    def socket(self, path: str) -> Any:
        """A WebSocket (`websockets.sync`) to the API. Raises CommandFailed."""
        from websockets.exceptions import InvalidStatus, WebSocketException
        from websockets.sync.client import connect

        url = "ws" + self.context.url.removeprefix("http") + path
        headers = {"authorization": f"Bearer {self.context.token}"} if self.context.token else {}
        verification = _verification(self.context)
        ssl = (None if verification is True else verification) if url.startswith("wss") else None
        try:
            return connect(url, additional_headers=headers, ssl=ssl, proxy=None, compression=None, max_size=None)
        except InvalidStatus as error:
            answer = httpx2.Response(error.response.status_code, content=bytes(error.response.body or b""))
            raise self.failure(answer, path) from error
        except (OSError, TimeoutError, WebSocketException) as error:
            raise self._unreachable(error) from error

    def request(
        self, method: str, path: str, *, body: Mapping[str, Any] | None = None, parameters: Mapping[str, Any] | None = None
    ) -> Any:
        """The answer's JSON, None for an empty one. Raises CommandFailed."""
        headers = {"idempotency-key": str(uuid.uuid4())} if method == "POST" else {}
        given = {name: value for name, value in (parameters or {}).items() if value is not None}
        answer = self._send(method, path, headers=headers, json=body, params=given)
        self.operation_id = answer.headers.get("x-operation-id")
        if answer.is_success:
            return answer.json() if answer.content else None
        raise self.failure(answer, path)

    def failure(self, answer: httpx2.Response, path: str) -> CommandFailed:
        try:
            problem = answer.json()
        except ValueError:
            problem = {"title": f"{self.context.url} answered {answer.status_code}, which is not from Bedplate"}
        if not isinstance(problem, dict):
            problem = {}
        return from_problem(answer.status_code, problem, _noun(path))

    def items(self, path: str, *, limit: int | None = None, **parameters: Any) -> Iterator[dict[str, Any]]:
        """Every item of a list, page by page; at most `limit`."""
        token, left = None, limit
        while left is None or left > 0:
            page_limit = 1000 if left is None else min(left, 1000)
            page = self.get(path, **parameters, page_token=token, limit=page_limit)
            yield from page["items"]
            token = page["next_page_token"]
            left = None if left is None else left - len(page["items"])
            if token is None:
                return

    @contextmanager
    def stream(self, path: str, *, headers: Mapping[str, str], **parameters: Any) -> Iterator[httpx2.Response]:
        """An answer that has no end. Raises CommandFailed for an error answer; httpx2.TransportError when it is cut."""
        given = {name: value for name, value in parameters.items() if value is not None}
        with self._http.stream("GET", path, headers=dict(headers), params=given) as answer:
            if not answer.is_success:
                answer.read()
                raise self.failure(answer, path)
            yield answer

    def project(self, given: str | None = None) -> str:
        """The project to work in: an option, the context's, or the one of a member's token."""
        name = given or self.context.project
        if not name and self.context.token:
            name = self.get("/v1/tokens/current")["project_id"] or ""
        if not name:
            raise CommandFailed(
                "no project is chosen",
                hint="bedplate project use NAME, or --project NAME (bedplate project list shows them)",
                exit_code=Exit.USAGE,
            )
        return name

    def in_project(self, plural: str, project: str | None = None) -> str:
        """`/v1/projects/<project>/<plural>`."""
        return f"/v1/projects/{quote(self.project(project), safe='')}/{plural}"

    def _send(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """Send, and again after a cut connection or a 503: reads, deletes and POSTs with a key may be repeated."""
        pause = _FIRST_PAUSE_SECONDS
        for attempt in range(1, _TRIES + 1):
            is_last = attempt == _TRIES or method == "PATCH"
            try:
                answer = self._http.request(method, path, **options)
            except httpx2.ConnectError as error:
                if is_last or attempt > 1:
                    raise self._unreachable(error) from error
            except httpx2.TimeoutException as error:
                if is_last:
                    raise CommandFailed(f"{self.context.url} did not answer in time", exit_code=Exit.TIMED_OUT) from error
            except httpx2.TransportError as error:
                if is_last:
                    raise self._unreachable(error) from error
            else:
                if answer.status_code != 503 or is_last:
                    return answer
            time.sleep(pause)
            pause *= 2
        raise AssertionError("unreachable")

    def _unreachable(self, error: Exception) -> CommandFailed:
        return CommandFailed(
            f"cannot reach {self.context.url}",
            why=str(error),
            hint="bedplate up starts one here; bedplate login URL chooses another; BEDPLATE_CA names its authority",
        )


def refuse_plain(url: str) -> None:
    """Raises CommandFailed where a token would travel in plain text."""
    is_insecure = url.startswith("http://") and not is_loopback(url)
    if is_insecure and os.environ.get("BEDPLATE_INSECURE_HTTP") not in {"1", "true"}:
        raise CommandFailed(
            f"will not send the token to {url} in plain text",
            hint="use https://, or set BEDPLATE_INSECURE_HTTP=1",
            exit_code=Exit.USAGE,
        )


def _verification(context: Context) -> Any:
    if not context.ca:
        return True
    import ssl

    return ssl.create_default_context(cafile=context.ca)


def _noun(path: str) -> str:
    """The noun in a path, for the hint `bedplate <noun> list`."""
    parts = [part for part in path.split("/") if part]
    plural = parts[3] if len(parts) > 3 and parts[1] == "projects" else parts[1] if len(parts) > 1 else ""
    return {"addresses": "address", "loadbalancers": "lb"}.get(plural, plural.removesuffix("s"))


def segment(ref: str) -> str:
    """A name or id as one part of a path."""
    return quote(ref, safe="")
