"""What gateways say of their load, and what the autoscaler made of it."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, Float, ForeignKey, Index, Integer
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base


class EndpointLoad(Base):
    """One gateway's last second at one endpoint, in an unlogged table: lost with the server, said anew a second later.

    `in_flight` and `queued` are means over that second, weighted by time, so that a stream counts for its whole life.
    """

    __tablename__ = "endpoint_load"

    gateway: Mapped[str] = mapped_column(primary_key=True)
    endpoint_id: Mapped[str] = mapped_column(primary_key=True)
    in_flight: Mapped[float] = mapped_column(Float)
    queued: Mapped[float] = mapped_column(Float)
    requests_per_second: Mapped[float] = mapped_column(Float)
    last_end_at: Mapped[datetime | None]
    at: Mapped[datetime]

    __table_args__ = (
        CheckConstraint("in_flight >= 0 AND queued >= 0 AND requests_per_second >= 0", name="not_negative"),
        {"prefixes": ["UNLOGGED"]},
    )


class AutoscalerDecision(Base):
    """One change of an endpoint's replicas, or one that could not be made, with its reason in words."""

    __tablename__ = "autoscaler_decision"

    id: Mapped[str] = mapped_column(primary_key=True)
    endpoint_id: Mapped[str] = mapped_column(ForeignKey("endpoint.id", ondelete="CASCADE"))
    at: Mapped[datetime]
    replicas_before: Mapped[int] = mapped_column(Integer)
    replicas_wanted: Mapped[int] = mapped_column(Integer)
    replicas_after: Mapped[int] = mapped_column(Integer)
    reason: Mapped[str]
    inputs: Mapped[dict[str, Json]]

    __table_args__ = (Index(None, "endpoint_id", "id"),)
