"""Keys of applications for the gateway. The one rule: the secret itself is nowhere; its SHA-256 is."""

from __future__ import annotations

from datetime import datetime
from ipaddress import IPv4Network, IPv6Network

from sqlalchemy import CheckConstraint, ForeignKey, Index, Text
from sqlalchemy.dialects.postgresql import ARRAY, CIDR
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base, Versioned


class Key(Versioned, Base):
    """None in `models`, `allowed_cidrs`, `scopes`: every model of the project, every address, every kind of call.

    Revoking deletes the row; usage keeps naming the id.
    """

    __tablename__ = "key"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"))
    name: Mapped[str]
    secret_sha256: Mapped[bytes] = mapped_column(unique=True)
    hint: Mapped[str]
    models: Mapped[list[str] | None] = mapped_column(ARRAY(Text))
    requests_per_minute: Mapped[int | None]
    tokens_per_minute: Mapped[int | None]
    model_limits: Mapped[dict[str, Json]] = mapped_column(default=dict, server_default="{}")
    token_budget: Mapped[int | None]
    token_budget_soft: Mapped[int | None]
    money_budget_micros: Mapped[int | None]
    money_budget_soft_micros: Mapped[int | None]
    budget_period: Mapped[str] = mapped_column(default="total", server_default="total")
    priority: Mapped[str] = mapped_column(default="normal", server_default="normal")
    expires_at: Mapped[datetime | None]
    max_concurrent: Mapped[int | None]
    allowed_cidrs: Mapped[list[IPv4Network | IPv6Network] | None] = mapped_column(ARRAY(CIDR))
    scopes: Mapped[list[str] | None] = mapped_column(ARRAY(Text))
    labels: Mapped[dict[str, Json]] = mapped_column(default=dict, server_default="{}")

    __table_args__ = (
        CheckConstraint("octet_length(secret_sha256) = 32", name="secret_sha256_form"),
        CheckConstraint("name ~ '^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$'", name="name_is_dns_label"),
        CheckConstraint("requests_per_minute > 0 AND tokens_per_minute > 0", name="limits_positive"),
        CheckConstraint("budget_period IN ('total', 'day', 'month')", name="budget_period_known"),
        CheckConstraint(
            "token_budget > 0 AND token_budget_soft > 0 AND money_budget_micros > 0 AND money_budget_soft_micros > 0",
            name="budgets_positive",
        ),
        CheckConstraint("priority IN ('low', 'normal', 'high')", name="priority_known"),
        CheckConstraint("max_concurrent > 0", name="max_concurrent_positive"),
        CheckConstraint(
            "scopes <@ ARRAY['chat', 'completion', 'embedding', 'rerank', 'audio', 'image'] AND cardinality(scopes) > 0",
            name="scopes_known",
        ),
        CheckConstraint("cardinality(allowed_cidrs) > 0", name="allowed_cidrs_not_empty"),
        Index(None, "project_id", "name", unique=True),
    )
