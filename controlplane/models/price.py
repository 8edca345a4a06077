"""The price book. The one rule: a price that was in force is never changed; a newer one takes its place from its time on."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, Index, func
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base, Versioned


class Price(Versioned, Base):
    """Of the model that an endpoint serves (its name in the catalogue; `*`: of every other), not of a public name.

    Millionths of the currency, for a million tokens and for each request; `cached` null: as `prompt`.
    """

    __tablename__ = "price"
    __table_args__ = (
        CheckConstraint("name ~ '^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$'", name="name_is_dns_label"),
        CheckConstraint("prompt >= 0 AND cached >= 0 AND completion >= 0 AND request >= 0", name="not_negative"),
        Index(None, "name", unique=True),
        Index(None, "model", "valid_from", unique=True),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    model: Mapped[str]
    valid_from: Mapped[datetime] = mapped_column(server_default=func.now())
    prompt: Mapped[int] = mapped_column(server_default="0")
    cached: Mapped[int | None]
    completion: Mapped[int] = mapped_column(server_default="0")
    request: Mapped[int] = mapped_column(server_default="0")
