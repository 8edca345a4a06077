"""Virtual machines: what is wanted, where it runs, what was seen.

The one rule: `vcpus` and `memory_bytes` are wanted; `applied_*` is what the host's document carries until the next boot.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Index
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base, Versioned


class Vm(Versioned, Base):
    """States: `waiting` (no host yet), `placed` (a host holds its resources), `deleting`.

    `owner_id`: the replica that this machine is the body of; such a one is not the tenant's to change. `workload`: the
    command it keeps running, a `WorkloadWanted` of the agent's protocol.
    """

    __tablename__ = "vm"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"))
    name: Mapped[str]
    description: Mapped[str] = mapped_column(server_default="")
    labels: Mapped[dict[str, Json]] = mapped_column(server_default="{}")
    is_protected: Mapped[bool] = mapped_column(server_default="false")

    owner_id: Mapped[str | None]
    image_id: Mapped[str] = mapped_column(ForeignKey("image.id"))
    workload: Mapped[dict[str, Json] | None] = mapped_column(JSONB(none_as_null=True))
    isolation: Mapped[str] = mapped_column(server_default="vm")
    vcpus: Mapped[int]
    memory_bytes: Mapped[int]
    applied_vcpus: Mapped[int]
    applied_memory_bytes: Mapped[int]
    placement: Mapped[dict[str, Json]] = mapped_column(server_default="{}")

    user: Mapped[str]
    ssh_keys: Mapped[list[Json]] = mapped_column(server_default="[]")
    user_data_sealed: Mapped[bytes | None]

    power: Mapped[str] = mapped_column(server_default="running")
    restart_generation: Mapped[int] = mapped_column(server_default="0")
    on_guest_poweroff: Mapped[str] = mapped_column(server_default="stop")

    state: Mapped[str] = mapped_column(server_default="waiting")
    host_id: Mapped[str | None] = mapped_column(ForeignKey("host.id"))
    driver: Mapped[str | None]
    shortage: Mapped[dict[str, Json] | None] = mapped_column(JSONB(none_as_null=True))
    deleting_at: Mapped[datetime | None]

    observed_power: Mapped[str] = mapped_column(server_default="unknown")
    observed_at: Mapped[datetime | None]
    observed_detail: Mapped[dict[str, Json]] = mapped_column(server_default="{}")
    started_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("state IN ('waiting', 'placed', 'deleting')", name="state_known"),
        CheckConstraint("(host_id IS NULL) = (driver IS NULL)", name="host_with_driver"),
        CheckConstraint("(state = 'waiting') <= (host_id IS NULL)", name="waiting_has_no_host"),
        CheckConstraint("(state = 'placed') <= (host_id IS NOT NULL AND shortage IS NULL)", name="placed_has_host"),
        CheckConstraint("(state = 'deleting') = (deleting_at IS NOT NULL)", name="deleting_has_time"),
        CheckConstraint("NOT (state = 'deleting' AND is_protected)", name="protected_is_not_deleting"),
        CheckConstraint("isolation IN ('vm', 'container')", name="isolation_known"),
        CheckConstraint("power IN ('running', 'stopped')", name="power_known"),
        CheckConstraint("on_guest_poweroff IN ('stop', 'restart')", name="on_guest_poweroff_known"),
        CheckConstraint("observed_power IN ('unknown', 'running', 'stopped', 'failed', 'absent')", name="observed_power_known"),
        CheckConstraint("(observed_power = 'unknown') = (observed_at IS NULL)", name="observed_has_time"),
        CheckConstraint("vcpus BETWEEN 1 AND 512 AND applied_vcpus BETWEEN 1 AND 512", name="vcpus_range"),
        CheckConstraint("memory_bytes >= 67108864 AND applied_memory_bytes >= 67108864", name="memory_range"),
        CheckConstraint("observed_generation <= generation", name="observed_not_ahead"),
        Index(None, "project_id", "name", unique=True),
        Index(None, "owner_id", unique=True),
        Index(None, "host_id"),
        Index(None, "image_id"),
        Index("vm_waiting_idx", "created_at", postgresql_where="state = 'waiting'"),
    )
