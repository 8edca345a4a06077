"""Usage records (partitioned by day) and hourly sums. The one rule: no foreign keys, so an account outlives what it counts."""

from __future__ import annotations

import re
from datetime import date, datetime

from sqlalchemy import CheckConstraint, Index
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base

PARTITION = re.compile(r"usage_record_\d{8}")
"""Names of the day partitions, which the gateways make; migrations know the parent only."""

OUTCOMES = ("completed", "client_closed", "upstream_died", "refused", "timed_out", "gateway_died")


class UsageRecord(Base):
    """One request that reached a replica. Identity: who wrote it and where in its journal; the day is part of it."""

    __tablename__ = "usage_record"
    __table_args__ = (
        CheckConstraint(f"outcome IN {OUTCOMES}", name="outcome_known"),
        CheckConstraint("prompt_tokens >= 0 AND completion_tokens >= 0 AND cached_tokens >= 0", name="tokens_not_negative"),
        CheckConstraint("outcome <> 'gateway_died' OR is_estimated", name="settled_is_estimated"),
        CheckConstraint("ended_at >= started_at", name="ends_after_start"),
        Index(None, "project_id", "started_at"),
        {"postgresql_partition_by": "RANGE (day)"},
    )

    day: Mapped[date] = mapped_column(primary_key=True)
    gateway: Mapped[str] = mapped_column(primary_key=True)
    segment: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    sequence: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime]
    project_id: Mapped[str]
    key_id: Mapped[str]
    model: Mapped[str]
    endpoint_id: Mapped[str]
    replica_id: Mapped[str]
    request_id: Mapped[str]
    path: Mapped[str]
    is_stream: Mapped[bool]
    outcome: Mapped[str]
    status: Mapped[int]
    prompt_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    served_model: Mapped[str] = mapped_column(server_default="")
    cost_micros: Mapped[int] = mapped_column(server_default="0")
    is_estimated: Mapped[bool]
    is_billable: Mapped[bool]
    attempts: Mapped[int]
    first_token_ms: Mapped[int | None]


class UsageHour(Base):
    """Sums by hour, project, key and model; tokens of billable records only, raised in the transaction that inserts them."""

    __tablename__ = "usage_hour"

    hour: Mapped[datetime] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str] = mapped_column(primary_key=True)
    requests: Mapped[int]
    prompt_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    cost_micros: Mapped[int] = mapped_column(server_default="0")
    estimated_requests: Mapped[int]
    unbilled_requests: Mapped[int]
