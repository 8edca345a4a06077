"""Files over HTTP on this machine, for what fetches them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MIB = 1 << 20


@dataclass
class Site:
    """Files over HTTP. `cuts`: how often an answer breaks off in its middle; `ranges`: whether parts can be had."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    cuts: int = 0
    ranges: bool = True
    asked: list[str] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    site: Site

    def do_GET(self) -> None:
        site, content = self.site, self.site.files.get(self.path.removeprefix("/"))
        asked = self.headers.get("range", "")
        site.asked.append(asked)
        if content is None:
            self.send_error(404)
            return
        begin = int(re.findall(r"\d+", asked)[0]) if asked and site.ranges else 0
        self.send_response(206 if begin else 200)
        self.send_header("content-length", str(len(content) - begin))
        if begin:
            self.send_header("content-range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        is_cut = site.cuts > 0 and len(content) > MIB
        site.cuts -= is_cut
        self.wfile.write(content[begin : (begin + len(content)) // 2] if is_cut else content[begin:])

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        del format, args


@contextmanager
def serving() -> Iterator[Site]:
    made = Site()
    handler = type("HandlerOfSite", (Handler,), {"site": made})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
    thread.join()
