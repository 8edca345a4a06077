"""The deployment itself: one row. `key_check` opens only under the master key that the secrets here are sealed with."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, LargeBinary, func
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base


class Deployment(Base):
    __tablename__ = "deployment"
    __table_args__ = (
        CheckConstraint("id = 1", name="is_one"),
        CheckConstraint("epoch > 0", name="epoch_is_positive"),
    )

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, default=1)
    epoch: Mapped[int] = mapped_column(default=1, server_default="1")  # raised by restoring a backup
    key_check: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
