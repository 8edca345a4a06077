"""Calls of a plain HTTP client, and the errors in their answers."""

from __future__ import annotations

import json

CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True}


async def post(http, gateway, body=CHAT, *, headers=None, path="/v1/chat/completions"):
    """Status, headers and body of one call."""
    options = {"data": body} if isinstance(body, bytes) else {"json": body}
    async with http.post(gateway.url + path, headers=gateway.headers if headers is None else headers, **options) as reply:
        return reply.status, reply.headers, await reply.read()


def error_of(body: bytes) -> dict:
    document = json.loads(body)
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    return document["error"]
