"""Dataclasses to JSON and back, strictly. Unknown fields, missing fields and wrong types are errors, never guesses.

Understands: str, int, float, bool, None, lists as tuples, dict[str, X], Literal, StrEnum, unions of dataclasses
(told apart by a `kind: Literal[…]` field), nested dataclasses.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


class DecodeError(ValueError):
    """What arrived does not fit the dataclass; `pointer` is a JSON Pointer to the place."""

    def __init__(self, pointer: str, detail: str) -> None:
        self.pointer = pointer or "/"
        self.detail = detail
        super().__init__(f"{self.pointer}: {detail}")


def encode(value: Any) -> Any:
    """Plain JSON values of a dataclass tree."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    return value


def decode(cls: type[T], data: Any) -> T:
    """An instance of `cls`; raises DecodeError."""
    return _decode(cls, data, "")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode(hint: Any, data: Any, at: str) -> Any:
    if hint is Any or hint is object:
        return data
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _decode_dataclass(hint, data, at)
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        if data not in typing.get_args(hint):
            raise DecodeError(at, f"must be one of {', '.join(map(str, typing.get_args(hint)))}")
        return data
    if origin in (typing.Union, types.UnionType):
        return _decode_union(typing.get_args(hint), data, at)
    if origin is tuple:
        return _decode_tuple(typing.get_args(hint), data, at)
    if origin is dict:
        if not isinstance(data, dict):
            raise DecodeError(at, "must be an object")
        item_hint = typing.get_args(hint)[1]
        return {str(key): _decode(item_hint, item, f"{at}/{key}") for key, item in data.items()}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(data)
        except ValueError:
            raise DecodeError(at, f"must be one of {', '.join(str(m.value) for m in hint)}") from None
    return _decode_scalar(hint, data, at)


def _decode_scalar(hint: Any, data: Any, at: str) -> Any:
    if hint is type(None):
        if data is not None:
            raise DecodeError(at, "must be null")
        return None
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if hint in (str, int, float, bool) and type(data) is hint:
        return data
    raise DecodeError(at, f"must be {getattr(hint, '__name__', hint)}, not {type(data).__name__}")


def _decode_tuple(arguments: tuple[Any, ...], data: Any, at: str) -> tuple[Any, ...]:
    if not isinstance(data, list | tuple):
        raise DecodeError(at, "must be a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_decode(arguments[0], item, f"{at}/{index}") for index, item in enumerate(data))
    if len(arguments) != len(data):
        raise DecodeError(at, f"must have {len(arguments)} items")
    return tuple(_decode(hint, item, f"{at}/{i}") for i, (hint, item) in enumerate(zip(arguments, data, strict=True)))


def _decode_union(options: tuple[Any, ...], data: Any, at: str) -> Any:
    if data is None and type(None) in options:
        return None
    classes = [option for option in options if dataclasses.is_dataclass(option)]
    if isinstance(data, dict) and len(classes) > 1:
        for option in classes:
            if data.get("kind") in typing.get_args(_hints(option).get("kind", Any)):
                return _decode(option, data, at)
        raise DecodeError(f"{at}/kind", "unknown kind")
    failure = DecodeError(at, "fits none of the alternatives")
    for option in options:
        if option is type(None):
            continue
        try:
            return _decode(option, data, at)
        except DecodeError as error:
            failure = error
    raise failure


def _decode_dataclass(cls: Any, data: Any, at: str) -> Any:
    if not isinstance(data, dict):
        raise DecodeError(at, "must be an object")
    hints = _hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in data:
        if name not in fields:
            raise DecodeError(f"{at}/{name}", "unknown field")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _decode(hints[name], data[name], f"{at}/{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise DecodeError(f"{at}/{name}", "missing")
    try:
        return cls(**values)
    except ValueError as error:
        raise DecodeError(at, str(error)) from error
