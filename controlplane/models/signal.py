"""A signal: a fact sent to a run. The one rule: the INSERT is the nudge and locks no run row (hence no foreign key)."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, Identity, Index, func, text
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base


class Signal(Base):
    """`seen_at` is set by the claim that saw it; the settle of the step that was told deletes it."""

    __tablename__ = "signal"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    run_id: Mapped[str]
    kind: Mapped[str]
    body: Mapped[dict[str, Json]] = mapped_column(server_default=text("'{}'::jsonb"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    seen_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("kind <> ''", name="kind_is_given"),
        Index("signal_unseen_idx", "run_id", postgresql_where=text("seen_at IS NULL")),
        Index("signal_seen_idx", "run_id", postgresql_where=text("seen_at IS NOT NULL")),
        {"postgresql_with": {"autovacuum_vacuum_scale_factor": "0.05"}},
    )
