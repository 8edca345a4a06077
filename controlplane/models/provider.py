"""External providers of models, with their keys sealed. The one rule: a key leaves the gateway only towards its provider."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey, Index, Text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base, Versioned


class Provider(Versioned, Base):
    """`kind`: the plug-in that speaks to it. `models`: its own names, called as `<name>/<model>`. `project_ids` null: all."""

    __tablename__ = "provider"
    __table_args__ = (
        CheckConstraint("name ~ '^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$'", name="name_is_dns_label"),
        CheckConstraint("cardinality(models) > 0", name="models_not_empty"),
        CheckConstraint("base_url ~ '^https?://'", name="base_url_is_http"),
        Index(None, "name", unique=True),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    kind: Mapped[str]
    base_url: Mapped[str]
    sealed_key: Mapped[bytes]
    hint: Mapped[str]
    models: Mapped[list[str]] = mapped_column(ARRAY(Text))
    project_ids: Mapped[list[str] | None] = mapped_column(ARRAY(Text))


class RouteProvider(Base):
    """One provider's model behind a route: a target of its own, or (`fallback_of`) what an endpoint cannot answer.

    `rule` and `fallback_of` are empty where there is none.
    """

    __tablename__ = "route_provider"
    __table_args__ = (CheckConstraint("weight BETWEEN 0 AND 1000", name="weight_range"), Index(None, "provider_id"))

    route_id: Mapped[str] = mapped_column(ForeignKey("route.id", ondelete="CASCADE"), primary_key=True)
    rule: Mapped[str] = mapped_column(primary_key=True)
    fallback_of: Mapped[str] = mapped_column(primary_key=True)
    provider_id: Mapped[str] = mapped_column(ForeignKey("provider.id"), primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    weight: Mapped[int] = mapped_column(server_default="1")
