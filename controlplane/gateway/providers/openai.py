"""Providers that speak OpenAI's API: bytes pass as they are but for the model's name and `ext_params`."""

from __future__ import annotations

from controlplane.core import json
from controlplane.core.json import JsonObject
from controlplane.gateway import problem
from controlplane.gateway.body import replace_member
from controlplane.gateway.directory import Price
from controlplane.gateway.providers import Events, Outbound, Outgoing
from controlplane.gateway.providers.parameters import merged, parameters


class AsItCame:
    def whole(self, body: bytes) -> bytes:
        return body

    def refusal(self, body: bytes) -> bytes:
        return body

    def events(self) -> Events | None:
        return None


class OpenAi:
    def to(self, asked: Outbound) -> Outgoing:
        if asked.path == "/v1/messages":
            raise problem.not_supported(asked.model, "a provider with OpenAI's API has no /v1/messages")
        body = merged(asked.body, asked.document, parameters(asked.document))
        body = replace_member(body, "model", json.dumps(asked.model))
        headers = (("authorization", f"Bearer {asked.key}"), ("content-type", "application/json"))
        return Outgoing(path=asked.path, headers=headers, body=body)

    def from_(self, asked: Outbound) -> AsItCame:
        del asked
        return AsItCame()

    def usage(self, document: JsonObject) -> JsonObject | None:
        usage = document.get("usage")
        return usage if isinstance(usage, dict) else None

    def price(self, model: str) -> Price | None:
        del model
        return None
