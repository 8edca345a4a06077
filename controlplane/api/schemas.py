"""What request and answer bodies have in common. The one rule: every field has a description and an example."""

from __future__ import annotations

from datetime import datetime
from types import UnionType
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

T = TypeVar("T")

NAME_PATTERN = r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$"
_LABEL_PATTERN = r"^[a-z0-9]([a-z0-9._/-]{0,61}[a-z0-9])?$"
PATTERN_WORDS = {
    NAME_PATTERN: "must be a letter, then letters, digits and inner hyphens, all of them small: 1 to 63",
    _LABEL_PATTERN: "must begin and end with a small letter or digit, with ., _, / and - between: 1 to 63",
    r"^[a-z_][a-z0-9_-]{0,31}$": "must be a name of a Linux user: small letters, digits, _ and -; 1 to 32",
    r"^[0-9a-f]{64}$": "must be a SHA-256 in 64 hexadecimal digits",
    r"^/[\x21-\x7e]*$": "must begin with / and hold no blanks",
    "^/": "must begin with /",
}
"""What people are told instead of a pattern that was not met."""

Name = Annotated[
    str,
    StringConstraints(pattern=NAME_PATTERN, max_length=63),
    Field(description="A DNS label: a letter, then letters, digits and inner hyphens; 1 to 63.", examples=["web-1"]),
]

_LabelKey = Annotated[str, StringConstraints(pattern=_LABEL_PATTERN, max_length=63)]
_LabelValue = Annotated[str, StringConstraints(max_length=255)]
Labels = Annotated[
    dict[_LabelKey, _LabelValue],
    Field(description="Free labels, at most 64.", examples=[{"team": "search"}], max_length=64),
]


WRONG_FIELD = "wrong_field"


def wrong_field(field: str, words: str) -> PydanticCustomError:
    """Raise it in a model validator: the problem then points at `field` of the object, not at the object."""
    return PydanticCustomError(WRONG_FIELD, "{words}", {"field": field, "words": words})


def _has_nul(value: Any) -> bool:
    match value:
        case str():
            return "\0" in value
        case list():
            return any(_has_nul(item) for item in value)
        case dict():
            return any(_has_nul(key) or _has_nul(item) for key, item in value.items())
        case _:
            return False


def _leaves(annotation: Any) -> set[Any]:
    """The types that a field's annotation is made of, without None; not those inside of lists and objects."""
    if get_origin(annotation) in (Union, UnionType, Annotated):
        parts = get_args(annotation)
        return set().union(*(_leaves(part) for part in (parts[:1] if get_origin(annotation) is Annotated else parts)))
    return set() if annotation is type(None) else {annotation}


class Input(BaseModel):
    """A request body: unknown fields are refused, and so are numbers and truth values written as something else."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def refuse_nul(cls, value: Any) -> Any:
        """PostgreSQL's text holds every character but U+0000."""
        if _has_nul(value):
            raise ValueError("must not contain the character U+0000")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def refuse_lookalikes(cls, value: Any, info: ValidationInfo) -> Any:
        """`"2"` and `true` are no numbers, `1` is no truth value: what was meant is the caller's to say."""
        leaves = _leaves(cls.model_fields[str(info.field_name)].annotation)
        if value is None or not leaves or not leaves <= {int, float, bool}:
            return value
        if isinstance(value, bool) != (leaves == {bool}) or isinstance(value, str):
            raise ValueError("must be true or false" if leaves == {bool} else "must be a number")
        return value


class View(BaseModel):
    """An answer body, read from a row's attributes."""

    model_config = ConfigDict(from_attributes=True)


class Resource(View):
    """What every resource shows."""

    id: str = Field(description="The id; it never changes.", examples=["vm_01jd2x4k3fe8v9m2q7t5w0y6za"])
    name: str = Field(description="The name, unique where the resource lives.", examples=["web-1"])
    generation: int = Field(description="Counts the changes of what is wanted; also the ETag.", examples=[1])
    created_at: datetime = Field(description="When it was made.", examples=["2026-11-30T12:00:00Z"])
    updated_at: datetime = Field(description="When it last changed.", examples=["2026-11-30T12:00:00Z"])


class Condition(View):
    """One statement about a resource that is true, false or unknown, with its reason."""

    type: str = Field(description="What is said, in one word.", examples=["Ready"])
    status: str = Field(description="`true`, `false` or `unknown`.", examples=["false"])
    reason: str = Field(default="", description="A stable code of why.", examples=["host.unreachable"])
    message: str = Field(default="", description="A sentence for people.", examples=["Host rack1-4 has not answered for 40 s."])
    since: datetime | None = Field(default=None, description="Since when.", examples=["2026-11-30T12:00:00Z"])


class Progress(View):
    """What is being done to a resource just now."""

    step: str = Field(description="The step of its program.", examples=["prepare"])
    attempt: int = Field(default=0, description="How often this step was begun.", examples=[1])
    deadline_at: datetime | None = Field(
        default=None, description="By when the step must be left.", examples=["2026-11-30T12:10:00Z"]
    )


class Listing(View, Generic[T]):
    """One page of a list."""

    items: list[T] = Field(description="The resources of this page, in the order asked for.", examples=[[]])
    next_page_token: str | None = Field(
        default=None, description="Give this as `page_token` to get the next page; null on the last one.", examples=[None]
    )


class ProblemField(BaseModel):
    """One wrong field."""

    pointer: str = Field(
        description="JSON Pointer (RFC 6901) into the part of the request named by `source`.", examples=["/name"]
    )
    detail: str = Field(description="What is wrong with it.", examples=["String should match pattern"])
    source: str = Field(default="body", description="`body`, `path`, `query` or `header`.", examples=["body"])


class Problem(BaseModel):
    """An error (RFC 9457, `application/problem+json`)."""

    type: str = Field(description="A URI that names the kind of error.", examples=["/docs/errors#project.name_taken"])
    title: str = Field(description="The kind of error in words.", examples=["The name is taken"])
    status: int = Field(description="The HTTP status.", examples=[409])
    detail: str = Field(description="What happened this time.", examples=["There is a project named web already."])
    code: str = Field(description="The stable code to program against.", examples=["project.name_taken"])
    request_id: str = Field(description="Finds this request in logs and audit.", examples=["req_01jd2x4k3fe8v9m2q7t5w0y6za"])
    errors: list[ProblemField] = Field(default_factory=list, description="Every wrong field.", examples=[[]])
    context: dict[str, object] = Field(default_factory=dict, description="Facts to decide by.", examples=[{}])
