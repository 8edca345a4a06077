"""A request on its way to a provider outside: its plug-in says what goes over the wire.

The one rule: nothing of the client's headers goes there but what the plug-in writes: they may say who asks, and from where.
"""

from __future__ import annotations

from controlplane.core import json
from controlplane.gateway import problem
from controlplane.gateway.call import Call
from controlplane.gateway.directory import ProviderEntry
from controlplane.gateway.providers import Answer, Outbound, plugins
from controlplane.gateway.upstream import Letter


def outside(provider: ProviderEntry, model: str, call: Call, body: bytes) -> tuple[Letter, Answer]:
    """Raises Problem 400 for what the provider cannot do, 502 when its plug-in is not installed."""
    plugin = plugins().get(provider.kind)
    if plugin is None:
        raise problem.upstream_error(f"the plug-in {provider.kind} of the provider {provider.name} is not installed here")
    document = json.loads(body)
    assert isinstance(document, dict)
    asked = Outbound(
        path=call.path,
        body=body,
        document=document,
        model=model,
        key=provider.key,
        is_stream=document.get("stream") is True,
    )
    outgoing = plugin.to(asked)
    headers = [*outgoing.headers, ("accept-encoding", "identity"), ("x-request-id", call.request_id.decode())]
    return Letter(url=provider.base_url + outgoing.path, headers=headers, body=outgoing.body), plugin.from_(asked)
