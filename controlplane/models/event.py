"""What happened, for watchers. The one rule: `position` is given by one publisher after commit, never by the insert's
sequence, because a lower number can commit after a higher one was delivered.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, Identity, Index, UniqueConstraint, func
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base


class Event(Base):
    __tablename__ = "event"
    __table_args__ = (
        UniqueConstraint("position", name="event_position_key"),
        Index("event_unpublished_idx", "sequence", postgresql_where="position IS NULL"),
        Index("event_project_id_position_idx", "project_id", "position"),
        CheckConstraint("position > 0", name="position_is_positive"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    sequence: Mapped[int] = mapped_column(BigInteger, Identity(always=True))
    position: Mapped[int | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    kind: Mapped[str]
    project_id: Mapped[str | None]
    subject_kind: Mapped[str]
    subject_id: Mapped[str]
    body: Mapped[dict[str, Json]]


class EventHead(Base):
    """The highest position given, in one row; it only grows, also when old events are removed."""

    __tablename__ = "event_head"
    __table_args__ = (CheckConstraint("id = 1", name="is_one"), CheckConstraint("position >= 0", name="position_counts"))

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, default=1)
    position: Mapped[int] = mapped_column(default=0, server_default="0")
