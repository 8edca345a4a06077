"""Routes: a public model name of a project and the endpoints behind it."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey, Index
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base, Versioned


class Route(Versioned, Base):
    """`timeouts`: seconds by name (`connect`, `first_token`, `idle`, `total`); what is absent has the gateway's default.

    `retry`: `max_attempts`, `backoff_ms`. `affinity`: `kind`, `header`. `rules`: in order, each `name` and `match`; their
    targets are `RouteRuleTarget`s.
    """

    __tablename__ = "route"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"))
    name: Mapped[str]
    timeouts: Mapped[dict[str, Json]] = mapped_column(default=dict, server_default="{}")
    retry: Mapped[dict[str, Json]] = mapped_column(default=dict, server_default="{}")
    affinity: Mapped[dict[str, Json]] = mapped_column(default=dict, server_default="{}")
    rules: Mapped[list[Json]] = mapped_column(JSONB, default=list, server_default="[]")

    __table_args__ = (
        CheckConstraint("name ~ '^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$'", name="name_form"),
        Index(None, "project_id", "name", unique=True),
    )


class RouteTarget(Base):
    """One endpoint behind a route; weights are relative. `fallback_endpoint_id` takes what this one cannot answer."""

    __tablename__ = "route_target"

    route_id: Mapped[str] = mapped_column(ForeignKey("route.id", ondelete="CASCADE"), primary_key=True)
    endpoint_id: Mapped[str] = mapped_column(ForeignKey("endpoint.id"), primary_key=True)
    weight: Mapped[int] = mapped_column(default=1, server_default="1")
    fallback_endpoint_id: Mapped[str | None] = mapped_column(ForeignKey("endpoint.id"))

    __table_args__ = (
        CheckConstraint("weight BETWEEN 0 AND 1000", name="weight_range"),
        CheckConstraint("fallback_endpoint_id <> endpoint_id", name="fallback_is_another"),
        Index(None, "endpoint_id"),
        Index(None, "fallback_endpoint_id"),
    )


class RouteRuleTarget(Base):
    """One endpoint behind a rule of a route, like `RouteTarget`."""

    __tablename__ = "route_rule_target"

    route_id: Mapped[str] = mapped_column(ForeignKey("route.id", ondelete="CASCADE"), primary_key=True)
    rule: Mapped[str] = mapped_column(primary_key=True)
    endpoint_id: Mapped[str] = mapped_column(ForeignKey("endpoint.id"), primary_key=True)
    weight: Mapped[int] = mapped_column(default=1, server_default="1")
    fallback_endpoint_id: Mapped[str | None] = mapped_column(ForeignKey("endpoint.id"))

    __table_args__ = (
        CheckConstraint("weight BETWEEN 0 AND 1000", name="weight_range"),
        CheckConstraint("fallback_endpoint_id <> endpoint_id", name="fallback_is_another"),
        Index(None, "endpoint_id"),
        Index(None, "fallback_endpoint_id"),
    )
