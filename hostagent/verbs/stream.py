"""Opening streams. The one rule: what a stream may touch is checked here, before its ticket exists."""

from __future__ import annotations

from dataclasses import replace

from hostagent.protocol.errors import AgentError
from hostagent.protocol.verbs import StreamRequest, StreamTicket
from hostagent.verbs.context import Agent
from hostagent.verbs.documents import check_id


async def open_stream(agent: Agent, body: StreamRequest) -> StreamTicket:
    """Raises AgentError `upload.unwanted`, `vm.unknown`, `stream.invalid` (none retryable)."""
    if body.kind == "upload":
        offset = _check_upload(agent, body)
        return StreamTicket(ticket=agent.tickets.issue(replace(body, offset=offset)), offset=offset)
    vm = agent.documents.get("vm", check_id(body.id))
    if vm is None:
        raise AgentError("vm.unknown", f"there is no machine {body.id} here", retryable=False)
    if body.kind == "tcp" and (not 1 <= body.port <= 65_535 or not vm.nics):
        raise AgentError("stream.invalid", "a tcp stream names a port of a machine with a nic", retryable=False)
    if body.offset < 0:
        raise AgentError("stream.invalid", "the offset is negative", retryable=False)
    return StreamTicket(ticket=agent.tickets.issue(body))


def _check_upload(agent: Agent, body: StreamRequest) -> int:
    for image in agent.documents.all("image"):
        for file in image.files:
            if (file.sha256, file.size_bytes) == (body.sha256, body.size_bytes):
                if (agent.paths.blobs / body.sha256).exists():
                    return body.size_bytes
                partial = agent.paths.uploads / body.sha256
                return min(partial.stat().st_size, body.size_bytes) if partial.exists() else 0
    raise AgentError("upload.unwanted", f"no image wants {body.sha256[:80]} of {body.size_bytes} bytes", retryable=False)
