"""Anthropic's Messages API: taken as it is from clients that speak it, and translated for clients of OpenAI's chat.

The one rule: what has no counterpart is refused or left out with a reason, never silently changed. (Version
2023-06-01.)
"""

from __future__ import annotations

from controlplane.core import json
from controlplane.core.json import Json, JsonObject
from controlplane.gateway import problem
from controlplane.gateway.body import replace_member
from controlplane.gateway.directory import Price
from controlplane.gateway.providers import Answer, Outbound, Outgoing
from controlplane.gateway.providers.anthropic_answer import AsChat
from controlplane.gateway.providers.openai import AsItCame
from controlplane.gateway.providers.parameters import NAME, merged, parameters

_VERSION = "2023-06-01"
_HEADERS = {"anthropic_version": "anthropic-version", "anthropic_beta": "anthropic-beta"}
_DEFAULT_MAX_TOKENS = 4096
_SAME = ("temperature", "top_p", "top_k", "stream", "thinking", "service_tier")
_UNKNOWN = ("n", "logprobs", "top_logprobs", "logit_bias", "audio", "response_format", "functions", "prediction")


class Anthropic:
    def to(self, asked: Outbound) -> Outgoing:
        extra = parameters(asked.document)
        headers = {"x-api-key": asked.key, "anthropic-version": _VERSION, "content-type": "application/json"}
        for name, header in _HEADERS.items():
            if name in extra:
                value = extra.pop(name)
                if not isinstance(value, str) or not value.isprintable() or not value.isascii():
                    raise problem.bad_request(f"{NAME}.{name} goes into a header and must be text.", param=f"{NAME}.{name}")
                headers[header] = value
        if asked.path == "/v1/messages":
            body = replace_member(merged(asked.body, asked.document, extra), "model", json.dumps(asked.model))
        elif asked.path == "/v1/chat/completions":
            body = json.dumps(_merge(_messages_request(asked, extra), extra))
        else:
            raise problem.not_supported(asked.model, f"Anthropic has no {asked.path}")
        return Outgoing(path="/v1/messages", headers=tuple(headers.items()), body=body)

    def from_(self, asked: Outbound) -> Answer:
        if asked.path == "/v1/messages":
            return AsItCame()
        options = asked.document.get("stream_options")
        return AsChat(has_usage=isinstance(options, dict) and bool(options.get("include_usage")))

    def usage(self, document: JsonObject) -> JsonObject | None:
        usage = document.get("usage")
        return usage if isinstance(usage, dict) else None

    def price(self, model: str) -> Price | None:
        del model
        return None


def _merge(request: JsonObject, extra: JsonObject) -> JsonObject:
    """Raises Problem 400 for what the translation has put there from another name."""
    for name in extra:
        if name in request and name != "max_tokens":
            raise problem.bad_request(f"'{name}' of the request and '{NAME}.{name}' are both given.", param=f"{NAME}.{name}")
    return {**request, **extra}


def _messages_request(asked: Outbound, extra: JsonObject) -> JsonObject:
    document = asked.document
    for name in _UNKNOWN:
        if document.get(name) not in (None, 1, False):
            raise problem.bad_request(f"{asked.model} does not support '{name}'.", param=name, code="unsupported_value")
    messages = document.get("messages")
    if not isinstance(messages, list):
        raise problem.bad_request("messages must be a list.", param="messages")
    system: list[Json] = []
    turns: list[Json] = []
    for message in messages:
        if not isinstance(message, dict):
            raise problem.bad_request("A message must be an object.", param="messages")
        if message.get("role") in ("system", "developer"):
            system += _parts(message.get("content"))
        else:
            _add_turn(turns, message)
    given = document.get("max_completion_tokens") or document.get("max_tokens")
    if given is not None and "max_tokens" in extra:
        name = "max_completion_tokens" if document.get("max_completion_tokens") else "max_tokens"
        raise problem.bad_request(f"'{name}' and '{NAME}.max_tokens' are both given.", param=f"{NAME}.max_tokens")
    request: JsonObject = {"model": asked.model, "max_tokens": given or _DEFAULT_MAX_TOKENS, "messages": turns}
    if system:
        request["system"] = system
    if stop := document.get("stop"):
        request["stop_sequences"] = stop if isinstance(stop, list) else [stop]
    if user := document.get("user"):
        request["metadata"] = {"user_id": user}
    request |= {name: document[name] for name in _SAME if document.get(name) is not None}
    return request | _tools(document)


def _tools(document: JsonObject) -> JsonObject:
    tools, choice = document.get("tools"), document.get("tool_choice")
    found: JsonObject = {}
    if isinstance(tools, list):
        functions = [tool["function"] for tool in tools if isinstance(tool, dict) and isinstance(tool.get("function"), dict)]
        found["tools"] = [
            {
                "name": function.get("name"),
                "description": function.get("description") or "",
                "input_schema": function.get("parameters") or {"type": "object"},
            }
            for function in functions
            if isinstance(function, dict)
        ]
    if isinstance(choice, str):
        found["tool_choice"] = {"type": {"required": "any"}.get(choice, choice)}
    elif isinstance(choice, dict) and isinstance(function := choice.get("function"), dict):
        found["tool_choice"] = {"type": "tool", "name": function.get("name")}
    return found


def _add_turn(turns: list[Json], message: JsonObject) -> None:
    """Results of tools are the user's there, and turns of one side follow each other in one."""
    role = message.get("role")
    if role == "tool":
        content = message.get("content")
        text: Json = content if isinstance(content, str) else _parts(content)
        parts: list[Json] = [{"type": "tool_result", "tool_use_id": message.get("tool_call_id"), "content": text}]
        role = "user"
    else:
        parts = _parts(message.get("content"))
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            parts.append(_tool_use(call))
    last = turns[-1] if turns else None
    if isinstance(last, dict) and last["role"] == role and isinstance(last["content"], list):
        last["content"] += parts
    else:
        turns.append({"role": role, "content": parts})


def _tool_use(call: Json) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise problem.bad_request("A tool call must have a function.", param="messages")
    try:
        arguments = json.loads(str(function.get("arguments") or "{}").encode())
    except ValueError as error:
        raise problem.bad_request("The arguments of a tool call are no JSON.", param="messages") from error
    return {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": arguments}


def _parts(content: Json) -> list[Json]:
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise problem.bad_request("The content of a message must be text or a list of parts.", param="messages")
    return [_part(part) for part in content]


def _part(part: Json) -> Json:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind == "text":
        return {"type": "text", "text": part.get("text")}
    if isinstance(part, dict) and kind == "image_url" and isinstance(image := part.get("image_url"), dict):
        url = str(image.get("url", ""))
        if not url.startswith("data:"):
            return {"type": "image", "source": {"type": "url", "url": url}}
        head, _, data = url.removeprefix("data:").partition(",")
        return {"type": "image", "source": {"type": "base64", "media_type": head.removesuffix(";base64"), "data": data}}
    raise problem.bad_request(f"A part of type {kind!r} is not supported.", param="messages", code="unsupported_value")
