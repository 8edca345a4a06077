"""A change that takes time: written with it, remembers the generation it made. The one rule: its end is written once."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, Index, func
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base


class Operation(Base):
    """`steps` are those of the subject's run between `created_at` and `finished_at`, see `kernel.operation`."""

    __tablename__ = "operation"
    __table_args__ = (
        Index("operation_unfinished_idx", "subject_id", postgresql_where="finished_at IS NULL"),
        Index("operation_project_id_id_idx", "project_id", "id"),
        CheckConstraint("state IN ('running', 'succeeded', 'failed', 'superseded')", name="state_is_known"),
        CheckConstraint("(state = 'running') = (finished_at IS NULL)", name="finished_has_time"),
        CheckConstraint("(state = 'failed') = (error_code IS NOT NULL)", name="failed_has_code"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now(), onupdate=func.now())
    action: Mapped[str]
    actor: Mapped[str]
    project_id: Mapped[str | None]
    subject_kind: Mapped[str]
    subject_id: Mapped[str]
    subject_generation: Mapped[int]
    state: Mapped[str] = mapped_column(default="running", server_default="running")
    error_code: Mapped[str | None]
    error_detail: Mapped[str | None]
    finished_at: Mapped[datetime | None]
    steps: Mapped[list[Json]] = mapped_column(default=list, server_default="[]")
