"""Disks. The one rule: a volume is attached to at most one machine, on its own host, and a root volume leaves with it."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Index
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base, Versioned

LIMITS = ("iops", "bytes_per_second", "burst_iops", "burst_bytes_per_second")


class Volume(Versioned, Base):
    """States: `creating`, `available`, `retained` (deleted, its data kept until `purge_at`), `deleting`.

    It begins as `root_file` of `image_id`, as a snapshot, or empty. `vm_id` with `is_detaching`: the machine may still have it.
    `owner_id`: the replica whose machine's root it is; such a one is not the tenant's to change, nor listed. `takes_effect`:
    when the machine sees the present size, as the host said. What it holds of its pool, its layers say.
    """

    __tablename__ = "volume"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"))
    owner_id: Mapped[str | None]
    name: Mapped[str]
    description: Mapped[str] = mapped_column(server_default="")
    labels: Mapped[dict[str, Json]] = mapped_column(server_default="{}")
    is_protected: Mapped[bool] = mapped_column(server_default="false")
    retention_hours: Mapped[int] = mapped_column(server_default="0")

    size_bytes: Mapped[int]
    image_id: Mapped[str | None] = mapped_column(ForeignKey("image.id"))
    snapshot_id: Mapped[str | None] = mapped_column(ForeignKey("snapshot.id"))
    pool: Mapped[str] = mapped_column(server_default="primary")
    backend: Mapped[str] = mapped_column(server_default="qsd")
    unlock: Mapped[str] = mapped_column(server_default="host")
    iops: Mapped[int] = mapped_column(server_default="0")
    bytes_per_second: Mapped[int] = mapped_column(server_default="0")
    burst_iops: Mapped[int] = mapped_column(server_default="0")
    burst_bytes_per_second: Mapped[int] = mapped_column(server_default="0")
    burst_seconds: Mapped[int] = mapped_column(server_default="1")
    num_queues: Mapped[int] = mapped_column(server_default="1")
    queue_size: Mapped[int] = mapped_column(server_default="128")

    state: Mapped[str] = mapped_column(server_default="creating")
    host_id: Mapped[str | None] = mapped_column(ForeignKey("host.id"))
    ready_at: Mapped[datetime | None]
    deleting_at: Mapped[datetime | None]
    purge_at: Mapped[datetime | None]

    vm_id: Mapped[str | None] = mapped_column(ForeignKey("vm.id"))
    attached_at: Mapped[datetime | None]
    is_detaching: Mapped[bool] = mapped_column(server_default="false")
    is_boot: Mapped[bool] = mapped_column(server_default="false")
    delete_with_vm: Mapped[bool] = mapped_column(server_default="false")

    observed_state: Mapped[str] = mapped_column(server_default="unknown")
    observed_at: Mapped[datetime | None]
    observed_size_bytes: Mapped[int] = mapped_column(server_default="0")
    observed_detail: Mapped[dict[str, Json]] = mapped_column(JSONB, server_default="{}")
    is_encrypted: Mapped[bool | None]
    takes_effect: Mapped[str | None]

    __table_args__ = (
        CheckConstraint("state IN ('creating', 'available', 'retained', 'deleting')", name="state_known"),
        CheckConstraint(
            "(state IN ('available', 'retained')) <= (host_id IS NOT NULL AND ready_at IS NOT NULL)", name="available_has_host"
        ),
        CheckConstraint("(state = 'creating') <= (ready_at IS NULL)", name="creating_is_not_ready"),
        CheckConstraint("(state = 'deleting') <= (deleting_at IS NOT NULL)", name="deleting_has_time"),
        CheckConstraint("(state = 'retained') = (purge_at IS NOT NULL)", name="retained_has_end"),
        CheckConstraint("(state = 'retained') <= (vm_id IS NULL AND deleting_at IS NOT NULL)", name="retained_is_free"),
        CheckConstraint("NOT (state IN ('retained', 'deleting') AND is_protected)", name="protected_is_not_deleting"),
        CheckConstraint("backend IN ('qsd', 'spdk', 'fake')", name="backend_known"),
        CheckConstraint("unlock IN ('host', 'control_plane')", name="unlock_known"),
        CheckConstraint("size_bytes >= 1048576 AND size_bytes % 512 = 0", name="size_in_sectors"),
        CheckConstraint("num_nonnulls(image_id, snapshot_id) <= 1", name="one_source"),
        CheckConstraint(
            "iops >= 0 AND bytes_per_second >= 0 AND burst_iops >= 0 AND burst_bytes_per_second >= 0",
            name="limits_not_negative",
        ),
        CheckConstraint("burst_seconds BETWEEN 1 AND 3600", name="burst_range"),
        CheckConstraint("num_queues BETWEEN 1 AND 64", name="num_queues_range"),
        CheckConstraint("queue_size BETWEEN 32 AND 1024", name="queue_size_range"),
        CheckConstraint("queue_size & (queue_size - 1) = 0", name="queue_size_power"),
        CheckConstraint("retention_hours BETWEEN 0 AND 8760", name="retention_range"),
        CheckConstraint("(vm_id IS NULL) = (attached_at IS NULL)", name="attached_has_time"),
        CheckConstraint("vm_id IS NOT NULL OR NOT (is_detaching OR is_boot OR delete_with_vm)", name="attachment_has_vm"),
        CheckConstraint("NOT (is_boot AND (is_detaching OR NOT delete_with_vm))", name="boot_leaves_with_vm"),
        CheckConstraint(
            "observed_state IN ('unknown', 'idle', 'exported', 'locked', 'failed', 'absent')", name="observed_state_known"
        ),
        CheckConstraint("takes_effect IN ('now', 'after_reboot')", name="takes_effect_known"),
        CheckConstraint("observed_generation <= generation", name="observed_not_ahead"),
        Index(None, "project_id", "name", unique=True),
        Index(None, "owner_id"),
        Index(None, "vm_id"),
        Index(None, "host_id", "pool"),
        Index(None, "image_id"),
        Index(None, "snapshot_id"),
        Index("volume_boot_key", "vm_id", unique=True, postgresql_where="is_boot"),
    )
