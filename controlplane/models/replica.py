"""Replicas: one machine each that serves an endpoint's model.

The one rule: a replica is `ready` only after its own `/v1/models` named the served model; only then has it an address here.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, Integer
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base, Versioned


class Replica(Versioned, Base):
    """States: `starting`, `ready`, `unhealthy` (fails its probe), `deleting`. A lost replica is replaced, never moved."""

    __tablename__ = "replica"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"))
    endpoint_id: Mapped[str] = mapped_column(ForeignKey("endpoint.id"))
    vm_id: Mapped[str | None] = mapped_column(ForeignKey("vm.id", ondelete="SET NULL"))
    revision: Mapped[int] = mapped_column(Integer, default=1, server_default="1")
    state: Mapped[str] = mapped_column(default="starting", server_default="starting")
    base_url: Mapped[str | None]
    ready_at: Mapped[datetime | None]
    failure: Mapped[str] = mapped_column(default="", server_default="")
    deleting_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("state IN ('starting', 'ready', 'unhealthy', 'deleting')", name="state_known"),
        CheckConstraint("(state = 'ready') <= (base_url IS NOT NULL AND ready_at IS NOT NULL)", name="ready_has_address"),
        CheckConstraint("(state = 'deleting') = (deleting_at IS NOT NULL)", name="deleting_has_time"),
        CheckConstraint("base_url ~ '^http://'", name="base_url_form"),
        ForeignKeyConstraint(
            ["endpoint_id", "revision"],
            ["endpoint_revision.endpoint_id", "endpoint_revision.number"],
            name="replica_endpoint_revision_fkey",
        ),
        Index(None, "endpoint_id"),
    )
