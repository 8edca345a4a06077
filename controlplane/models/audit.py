"""Who changed what: one row a change, in the change's own transaction. No foreign keys: history outlives its subjects."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Index, func
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base


class AuditEntry(Base):
    __tablename__ = "audit"
    __table_args__ = (
        Index("audit_project_id_id_idx", "project_id", "id"),
        Index("audit_subject_id_id_idx", "subject_id", "id"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    actor: Mapped[str]  # the token's id, or the name of a part of Bedplate
    actor_name: Mapped[str]
    action: Mapped[str]
    project_id: Mapped[str | None]
    subject_kind: Mapped[str]
    subject_id: Mapped[str]
    request_id: Mapped[str]
    before: Mapped[dict[str, Json] | None]
    after: Mapped[dict[str, Json] | None]
