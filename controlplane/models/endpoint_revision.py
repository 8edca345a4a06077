"""What an endpoint's replicas were made of, each time that changed.

The one rule: a revision never changes; an endpoint's own columns are those of its present revision.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ARRAY, BigInteger, CheckConstraint, ForeignKey, Integer, func
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base


class EndpointRevision(Base):
    """`number` counts from 1 in each endpoint. `failure`: why it was taken back, empty when it was not."""

    __tablename__ = "endpoint_revision"

    endpoint_id: Mapped[str] = mapped_column(ForeignKey("endpoint.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    model: Mapped[str]
    spec: Mapped[dict[str, Json]]
    vcpus: Mapped[int]
    memory_bytes: Mapped[int]
    failure: Mapped[str] = mapped_column(default="", server_default="")
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        CheckConstraint("number > 0", name="number_positive"),
        CheckConstraint("vcpus > 0 AND memory_bytes > 0", name="shape_positive"),
    )


class RevisionTraffic(Base):
    """What one gateway saw of a revision while it is rolled out, in an unlogged table: counts since it saw the roll-out.

    `ttft_counts`: answers by time to the first token, in the buckets of `controlplane.metering.latency`.
    """

    __tablename__ = "revision_traffic"

    gateway: Mapped[str] = mapped_column(primary_key=True)
    endpoint_id: Mapped[str] = mapped_column(primary_key=True)
    revision: Mapped[int] = mapped_column(Integer, primary_key=True)
    requests: Mapped[int]
    failures: Mapped[int]
    ttft_counts: Mapped[list[int]] = mapped_column(ARRAY(BigInteger))
    at: Mapped[datetime]

    __table_args__ = (
        CheckConstraint("requests >= 0 AND failures >= 0", name="not_negative"),
        {"prefixes": ["UNLOGGED"]},
    )
