"""Is the model served? Asks a replica's own `/v1/models` through its host, and reads the answer strictly.

The one rule: only the served model's id counts; a health page that says yes does not.
"""

from __future__ import annotations

import asyncio

from controlplane.core import json
from controlplane.remote.link import AgentError, HostLinks, HostUnreachable
from hostagent.protocol.verbs import StreamRequest

PROBE_SECONDS = 10.0
MAX_ANSWER_BYTES = 1 << 20
_REQUEST = b"GET /v1/models HTTP/1.0\r\nHost: replica\r\nAccept: application/json\r\n\r\n"


class NotServed(Exception):
    """The replica does not serve the model (yet); the text says what it answered."""


async def probe(hosts: HostLinks, host_id: str, machine_id: str, *, port: int, served_model_id: str) -> None:
    """Return when the replica lists the model; raises NotServed, or HostUnreachable when the host cannot be asked."""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            answer = await _ask(hosts, host_id, StreamRequest(kind="tcp", id=machine_id, port=port))
    except TimeoutError as error:
        raise NotServed(f"no answer within {PROBE_SECONDS:g} s") from error
    except AgentError as error:
        raise NotServed(error.message) from error
    served = models_in(answer)
    if served_model_id not in served:
        raise NotServed(f"it serves {', '.join(sorted(served)) or 'nothing'}, not {served_model_id}")


async def _ask(hosts: HostLinks, host_id: str, request: StreamRequest) -> bytes:
    stream = await hosts.open_stream(host_id, request, deadline_seconds=PROBE_SECONDS)
    try:
        await stream.write(_REQUEST)
        answer = b""
        while len(answer) < MAX_ANSWER_BYTES and not _is_whole(answer) and (data := await stream.read()):
            answer += data
        return answer
    finally:
        await stream.close()


def _is_whole(answer: bytes) -> bool:
    """Whether as many bytes as the answer promises have arrived; some servers keep the connection open."""
    head, separator, body = answer.partition(b"\r\n\r\n")
    if not separator:
        return False
    for line in head.lower().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"content-length" and value.strip().isdigit():
            return len(body) >= int(value)
    return False


def models_in(answer: bytes) -> set[str]:
    """The ids in an HTTP answer of `/v1/models`; raises NotServed for anything else."""
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(b"\r\n", 1)[0].split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1."):
        raise NotServed("it does not speak HTTP yet")
    if words[1] != b"200":
        raise NotServed(f"it answers {words[1].decode('latin-1')[:3]}")
    try:
        document = json.loads(body)
    except ValueError as error:
        raise NotServed("it answers no JSON") from error
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, list):
        raise NotServed("it lists no models")
    return {str(item["id"]) for item in data if isinstance(item, dict) and "id" in item}


__all__ = ["HostUnreachable", "NotServed", "models_in", "probe"]
