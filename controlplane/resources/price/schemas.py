"""Bodies of the price routes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, Field, StringConstraints, field_validator

from controlplane.api.schemas import Input, Name, Resource
from controlplane.core.money import micros_of, text_of


def amount(text: str) -> str:
    micros_of(text)
    return text


Amount = Annotated[str, StringConstraints(max_length=20), AfterValidator(amount)]
_MODEL = "The model's name in the catalogue, or `provider/model`; `*`: every model without a price of its own."


class PriceCreate(Input):
    """Amounts are decimal text in the deployment's currency; tokens are counted by the million."""

    name: Name
    model: str = Field(min_length=1, max_length=256, description=_MODEL, examples=["qwen2.5-7b-instruct"])
    valid_from: AwareDatetime | None = Field(
        default=None, description="From when on; null: now.", examples=["2027-01-01T00:00:00Z"]
    )
    prompt: Amount = Field(default="0", description="A million tokens of prompts.", examples=["0.15"])
    cached: Amount | None = Field(
        default=None, description="A million tokens of prompts from the engine's cache; null: as `prompt`.", examples=["0.05"]
    )
    completion: Amount = Field(default="0", description="A million tokens of answers.", examples=["0.60"])
    request: Amount = Field(default="0", description="Each request.", examples=["0.0001"])


class PriceView(Resource):
    model: str = Field(description=_MODEL, examples=["qwen2.5-7b-instruct"])
    valid_from: AwareDatetime = Field(description="From when on.", examples=["2027-01-01T00:00:00Z"])
    prompt: str = Field(description="A million tokens of prompts.", examples=["0.15"])
    cached: str | None = Field(description="A million cached tokens; null: as `prompt`.", examples=["0.05"])
    completion: str = Field(description="A million tokens of answers.", examples=["0.60"])
    request: str = Field(description="Each request.", examples=["0.0001"])

    @field_validator("prompt", "cached", "completion", "request", mode="before")
    @classmethod
    def as_text(cls, value: Any) -> Any:
        return text_of(value) if isinstance(value, int) else value
