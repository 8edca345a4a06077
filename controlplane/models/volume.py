"""Disks. The one rule: a volume is attached to at most one machine, and a boot volume leaves with it."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base, Versioned


class Volume(Versioned, Base):
    """`size_bytes` is wanted; the disk's base is `root_file` of `image_id`, or it starts empty."""

    __tablename__ = "volume"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"))
    name: Mapped[str]
    size_bytes: Mapped[int]
    image_id: Mapped[str | None] = mapped_column(ForeignKey("image.id"))
    backend: Mapped[str] = mapped_column(server_default="qsd")
    state: Mapped[str] = mapped_column(server_default="creating")
    host_id: Mapped[str | None] = mapped_column(ForeignKey("host.id"))
    owner_id: Mapped[str | None]
    is_boot: Mapped[bool] = mapped_column(server_default="false")
    ready_at: Mapped[datetime | None]
    deleting_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("state IN ('creating', 'available', 'deleting')", name="state_known"),
        CheckConstraint("(state = 'available') <= (host_id IS NOT NULL AND ready_at IS NOT NULL)", name="available_has_host"),
        CheckConstraint("(state = 'creating') <= (ready_at IS NULL)", name="creating_is_not_ready"),
        CheckConstraint("(state = 'deleting') = (deleting_at IS NOT NULL)", name="deleting_has_time"),
        CheckConstraint("backend IN ('qsd', 'spdk', 'fake')", name="backend_known"),
        CheckConstraint("size_bytes >= 1048576 AND size_bytes % 512 = 0", name="size_in_sectors"),
        CheckConstraint("NOT is_boot OR owner_id IS NOT NULL", name="boot_has_owner"),
        Index(None, "project_id", "name", unique=True),
        Index(None, "owner_id"),
        Index("volume_boot_key", "owner_id", unique=True, postgresql_where="is_boot"),
    )
