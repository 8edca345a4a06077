"""Snapshots: what a volume held at one moment. The one rule: one outlives its volume, and no volume that began as it."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base, Versioned


class Snapshot(Versioned, Base):
    """It lies on its volume's host, in its pool. `volume_id` has no foreign key: the volume may be gone."""

    __tablename__ = "snapshot"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"))
    name: Mapped[str]
    description: Mapped[str] = mapped_column(server_default="")
    labels: Mapped[dict[str, Json]] = mapped_column(server_default="{}")
    is_protected: Mapped[bool] = mapped_column(server_default="false")

    volume_id: Mapped[str]
    volume_name: Mapped[str]
    size_bytes: Mapped[int]
    pool: Mapped[str]
    backend: Mapped[str]
    host_id: Mapped[str] = mapped_column(ForeignKey("host.id"))

    state: Mapped[str] = mapped_column(server_default="creating")
    taken_at: Mapped[datetime | None]
    consistency: Mapped[str | None]
    deleting_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("state IN ('creating', 'available', 'deleting')", name="state_known"),
        CheckConstraint(
            "(state = 'available') <= (taken_at IS NOT NULL AND consistency IS NOT NULL)", name="available_was_taken"
        ),
        CheckConstraint("(state = 'deleting') = (deleting_at IS NOT NULL)", name="deleting_has_time"),
        CheckConstraint("NOT (state = 'deleting' AND is_protected)", name="protected_is_not_deleting"),
        CheckConstraint("consistency IN ('crash', 'frozen')", name="consistency_known"),
        CheckConstraint("backend IN ('qsd', 'spdk', 'fake')", name="backend_known"),
        CheckConstraint("size_bytes >= 1048576", name="size_positive"),
        CheckConstraint("observed_generation <= generation", name="observed_not_ahead"),
        Index(None, "project_id", "name", unique=True),
        Index(None, "volume_id"),
        Index(None, "host_id"),
    )
