"""Answers of POST requests that carried an Idempotency-Key. The answer is sealed: it may hold a secret shown once."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, LargeBinary, func
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base


class IdempotencyKey(Base):
    __tablename__ = "idempotency_key"
    __table_args__ = (CheckConstraint("(status IS NULL) = (answer IS NULL)", name="status_has_answer"),)

    actor: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    request_sha256: Mapped[bytes] = mapped_column(LargeBinary)  # of method, path and body
    created_at: Mapped[datetime] = mapped_column(server_default=func.now(), index=True)
    status: Mapped[int | None]
    answer: Mapped[bytes | None] = mapped_column(LargeBinary)
