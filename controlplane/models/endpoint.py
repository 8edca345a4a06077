"""Endpoints: N replicas of one model on one shape of machine.

The one rule: `spec` is the catalogue entry as it was when the endpoint was made or updated; the catalogue may change, an
endpoint does not with it.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Index, Integer
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base, Versioned


class Endpoint(Versioned, Base):
    """`revision`: what its replicas shall be made of (`endpoint_revision`); `rollout`: how it gets there, while it does
    (`controlplane.resources.endpoint.rollout`). `autoscale`: bounds and targets; null = as many replicas as asked.
    `max_in_flight`: a replica's limit, 0 = none.

    States: `active`, `deleting`. `isolation`: what the tenant asked for; `auto` = a VM where KVM works, else a container.
    """

    __tablename__ = "endpoint"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"))
    name: Mapped[str]
    description: Mapped[str] = mapped_column(default="", server_default="")
    labels: Mapped[dict[str, Json]] = mapped_column(default=dict, server_default="{}")
    model: Mapped[str]
    spec: Mapped[dict[str, Json]]
    revision: Mapped[int] = mapped_column(Integer, default=1, server_default="1")
    rollout: Mapped[dict[str, Json] | None] = mapped_column(JSONB(none_as_null=True))
    network_id: Mapped[str | None] = mapped_column(ForeignKey("network.id"))
    replicas: Mapped[int]
    isolation: Mapped[str] = mapped_column(default="auto", server_default="auto")
    vcpus: Mapped[int]
    memory_bytes: Mapped[int]
    state: Mapped[str] = mapped_column(default="active", server_default="active")
    autoscale: Mapped[dict[str, Json] | None] = mapped_column(JSONB(none_as_null=True))
    max_in_flight: Mapped[int] = mapped_column(default=0, server_default="0")
    ready_replicas: Mapped[int] = mapped_column(default=0, server_default="0")
    shortage: Mapped[dict[str, Json] | None] = mapped_column(JSONB(none_as_null=True))
    deleting_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("name ~ '^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$'", name="name_is_dns_label"),
        CheckConstraint("state IN ('active', 'deleting')", name="state_known"),
        CheckConstraint("(state = 'deleting') = (deleting_at IS NOT NULL)", name="deleting_has_time"),
        CheckConstraint("isolation IN ('auto', 'vm', 'container')", name="isolation_known"),
        CheckConstraint("replicas BETWEEN 0 AND 1000", name="replicas_range"),
        CheckConstraint("max_in_flight BETWEEN 0 AND 100000", name="max_in_flight_range"),
        CheckConstraint("ready_replicas >= 0", name="ready_not_negative"),
        CheckConstraint("vcpus > 0 AND memory_bytes > 0", name="shape_positive"),
        CheckConstraint("observed_generation <= generation", name="observed_not_ahead"),
        CheckConstraint("revision > 0", name="revision_positive"),
        Index(None, "project_id", "name", unique=True),
    )
