"""An incident: what an operator sees when something needs a person. One open row per (run or subject, code)."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, Index, func, text
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base


class Incident(Base):
    """`count` says how often it happened between `first_at` and `last_at`; `detail` names the cause in words."""

    __tablename__ = "incident"

    id: Mapped[str] = mapped_column(primary_key=True)
    code: Mapped[str]
    subject: Mapped[str]
    run_id: Mapped[str | None]
    program: Mapped[str | None]
    step: Mapped[str | None]
    detail: Mapped[str]
    context: Mapped[dict[str, Json]] = mapped_column(server_default=text("'{}'::jsonb"))
    count: Mapped[int] = mapped_column(server_default="1")
    first_at: Mapped[datetime] = mapped_column(server_default=func.now())
    last_at: Mapped[datetime] = mapped_column(server_default=func.now())
    resolved_at: Mapped[datetime | None]
    resolved_by: Mapped[str | None]

    __table_args__ = (
        CheckConstraint("code <> '' AND subject <> '' AND detail <> ''", name="says_what"),
        CheckConstraint("count >= 1", name="happened"),
        CheckConstraint("last_at >= first_at", name="times_in_order"),
        CheckConstraint("(resolved_at IS NULL) = (resolved_by IS NULL)", name="resolved_by_someone"),
        CheckConstraint("run_id IS NULL OR (program IS NOT NULL AND step IS NOT NULL)", name="run_says_where"),
        Index(
            "incident_open_key",
            "subject",
            "code",
            "run_id",
            unique=True,
            postgresql_nulls_not_distinct=True,
            postgresql_where=text("resolved_at IS NULL"),
        ),
        Index("incident_last_at_idx", "last_at"),
    )
