"""Failures of signing in, by client address and by names that nobody has. The one rule: a name that nobody has is counted and
locked like one that somebody has, so that an answer tells neither.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, Index, func
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base


class Attempt(Base):
    """`key` is `address <address>` or `name <SHA-256 of the name>`: what strangers type rests nowhere."""

    __tablename__ = "attempt"
    __table_args__ = (
        CheckConstraint("key ~ '^(address|name) '", name="key_says_of_what"),
        CheckConstraint("failed_sign_ins >= 0", name="failures_are_counted"),
        CheckConstraint("(failed_sign_ins = 0) = (failed_at IS NULL)", name="failures_have_a_time"),
        Index("attempt_began_at_idx", "began_at"),
    )

    key: Mapped[str] = mapped_column(primary_key=True)
    began_at: Mapped[datetime] = mapped_column(server_default=func.now())
    failed_sign_ins: Mapped[int] = mapped_column(default=0, server_default="0")
    failed_at: Mapped[datetime | None]
    locked_until: Mapped[datetime | None]
