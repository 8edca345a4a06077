"""Bodies of the key routes."""

from __future__ import annotations

from ipaddress import ip_interface, ip_network
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, AwareDatetime, Field, StringConstraints, field_validator

from controlplane.api.schemas import Input, Labels, Name, Resource
from controlplane.core.money import micros_of, text_of


def prefix(text: str) -> str:
    """An IPv4 or IPv6 prefix without host bits; ValueError with a sentence otherwise."""
    try:
        network = ip_network(text.strip(), strict=False)
    except ValueError:
        raise ValueError(f"{text!r} is no prefix, like 10.0.0.0/8") from None
    if ip_interface(text.strip()).ip != network.network_address:
        raise ValueError(f"{text!r} has host bits set; the prefix is {network}")
    return str(network)


Models = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=128)]] | None,
    Field(
        max_length=256,
        description="Public model names the key may call; null: every model of the project.",
        examples=[["smollm2"]],
    ),
]
Concurrency = Annotated[int | None, Field(ge=1, le=1_000_000)]
Cidrs = Annotated[
    list[Annotated[str, StringConstraints(max_length=64), AfterValidator(prefix)]] | None, Field(min_length=1, max_length=64)
]
Scopes = Annotated[list[Literal["chat", "completion", "embedding", "rerank", "audio", "image"]] | None, Field(min_length=1)]
Limit = Annotated[int | None, Field(ge=1, le=10**12)]
_REQUESTS = "Requests a minute; null: the deployment's limit."
_TOKENS = "Tokens a minute, prompt and answer together; null: the deployment's limit."
_MODEL_LIMITS = "Limits for one model, beside those for all; null: the key's."
_EXAMPLE = {"chat": {"requests_per_minute": 60, "tokens_per_minute": 50_000}}
_BUDGET_TOKENS = "Tokens in a period, prompts and answers together; what would exceed it is refused. Null: no budget."
_SOFT_TOKENS = "From so many tokens on an event and a header tell; nothing is refused."
_BUDGET_MONEY = "Money in a period, by the price book, in the deployment's currency; null: no budget."
_SOFT_MONEY = "From so much money on an event and a header tell."
_PERIOD = "When budgets begin anew: never (`total`), each day, each month (UTC). Counted from when a budget is set."
_PRIORITY = "Who goes first when requests wait for a replica, and who is shed when too many do."
_LABELS = "Labels of the key, which rules of routes can ask for."
_CONCURRENT = "Requests at a time, at all gateways together; null: no limit."
_CIDRS = "Addresses the key may be used from; null: all."
_SCOPES = "Kinds of call the key is for; null: all."
_EXPIRY = "From when on it is refused; null: never."


def amount(text: str) -> str:
    if not micros_of(text):
        raise ValueError("must be more than 0")
    return text


Money = Annotated[Annotated[str, StringConstraints(max_length=20), AfterValidator(amount)] | None, Field()]
Priority = Literal["low", "normal", "high"]
Period = Literal["total", "day", "month"]


class ModelLimits(Input):
    """Of one model."""

    requests_per_minute: Limit = Field(default=None, description=_REQUESTS, examples=[60])
    tokens_per_minute: Limit = Field(default=None, description=_TOKENS, examples=[50_000])


LimitsOfModels = Annotated[
    dict[Annotated[str, StringConstraints(min_length=1, max_length=128)], ModelLimits], Field(max_length=64)
]


class KeyCreate(Input):
    name: Name
    models: Models = None
    requests_per_minute: Limit = Field(default=None, description=_REQUESTS, examples=[600])
    tokens_per_minute: Limit = Field(default=None, description=_TOKENS, examples=[200_000])
    model_limits: LimitsOfModels = Field(default_factory=dict, description=_MODEL_LIMITS, examples=[_EXAMPLE])
    token_budget: Limit = Field(default=None, description=_BUDGET_TOKENS, examples=[10_000_000])
    token_budget_soft: Limit = Field(default=None, description=_SOFT_TOKENS, examples=[8_000_000])
    money_budget: Money = Field(default=None, description=_BUDGET_MONEY, examples=["100.00"])
    money_budget_soft: Money = Field(default=None, description=_SOFT_MONEY, examples=["80.00"])
    budget_period: Period = Field(default="total", description=_PERIOD, examples=["month"])
    priority: Priority = Field(default="normal", description=_PRIORITY, examples=["high"])
    expires_at: AwareDatetime | None = Field(default=None, description=_EXPIRY, examples=["2027-01-01T00:00:00Z"])
    max_concurrent: Concurrency = Field(default=None, description=_CONCURRENT, examples=[16])
    allowed_cidrs: Cidrs = Field(default=None, description=_CIDRS, examples=[["10.0.0.0/8"]])
    scopes: Scopes = Field(default=None, description=_SCOPES, examples=[["chat"]])
    labels: Labels = Field(default_factory=dict, description=_LABELS, examples=[{"team": "search"}])


class KeyUpdate(Input):
    """Only the fields that are sent change; in force within a second."""

    models: Models = None
    requests_per_minute: Limit = Field(default=None, description=_REQUESTS, examples=[600])
    tokens_per_minute: Limit = Field(default=None, description=_TOKENS, examples=[200_000])
    model_limits: LimitsOfModels = Field(default_factory=dict, description=_MODEL_LIMITS, examples=[_EXAMPLE])
    token_budget: Limit = Field(default=None, description=_BUDGET_TOKENS, examples=[10_000_000])
    token_budget_soft: Limit = Field(default=None, description=_SOFT_TOKENS, examples=[8_000_000])
    money_budget: Money = Field(default=None, description=_BUDGET_MONEY, examples=["100.00"])
    money_budget_soft: Money = Field(default=None, description=_SOFT_MONEY, examples=["80.00"])
    budget_period: Period = Field(default="total", description=_PERIOD, examples=["month"])
    priority: Priority = Field(default="normal", description=_PRIORITY, examples=["high"])
    expires_at: AwareDatetime | None = Field(default=None, description=_EXPIRY, examples=["2027-01-01T00:00:00Z"])
    max_concurrent: Concurrency = Field(default=None, description=_CONCURRENT, examples=[16])
    allowed_cidrs: Cidrs = Field(default=None, description=_CIDRS, examples=[["10.0.0.0/8"]])
    scopes: Scopes = Field(default=None, description=_SCOPES, examples=[["chat"]])
    labels: Labels = Field(default_factory=dict, description=_LABELS, examples=[{"team": "search"}])


class KeyView(Resource):
    hint: str = Field(description="The key's last four characters.", examples=["x3Zq"])
    models: Models
    requests_per_minute: int | None = Field(description=_REQUESTS, examples=[600])
    tokens_per_minute: int | None = Field(description=_TOKENS, examples=[200_000])
    model_limits: dict[str, ModelLimits] = Field(description=_MODEL_LIMITS, examples=[_EXAMPLE])
    token_budget: int | None = Field(description=_BUDGET_TOKENS, examples=[10_000_000])
    token_budget_soft: int | None = Field(description=_SOFT_TOKENS, examples=[8_000_000])
    money_budget: str | None = Field(
        validation_alias=AliasChoices("money_budget_micros", "money_budget"), description=_BUDGET_MONEY, examples=["100.00"]
    )
    money_budget_soft: str | None = Field(
        validation_alias=AliasChoices("money_budget_soft_micros", "money_budget_soft"),
        description=_SOFT_MONEY,
        examples=["80.00"],
    )
    budget_period: str = Field(description=_PERIOD, examples=["month"])
    priority: str = Field(description=_PRIORITY, examples=["high"])
    expires_at: AwareDatetime | None = Field(description=_EXPIRY, examples=["2027-01-01T00:00:00Z"])
    max_concurrent: int | None = Field(description=_CONCURRENT, examples=[16])
    allowed_cidrs: list[str] | None = Field(description=_CIDRS, examples=[["10.0.0.0/8"]])
    scopes: list[str] | None = Field(description=_SCOPES, examples=[["chat"]])
    labels: dict[str, str] = Field(description=_LABELS, examples=[{"team": "search"}])

    @field_validator("money_budget", "money_budget_soft", mode="before")
    @classmethod
    def as_money(cls, value: Any) -> Any:
        return text_of(value) if isinstance(value, int) else value

    @field_validator("allowed_cidrs", mode="before")
    @classmethod
    def as_text(cls, value: Any) -> Any:
        return None if value is None else [str(cidr) for cidr in value]


class KeyCreated(KeyView):
    secret: str = Field(description="The key for the gateway, shown this once.", examples=["bpk_…"])
