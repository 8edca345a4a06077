"""Places for volumes on hosts: what each holds, and what of it is promised.

The one rule: `reserved_bytes` is the sum of what its layers hold, and changes with them in one transaction.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, ColumnElement, ForeignKey, Index, func
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base, Stamped

KEPT_FREE_PERCENT = 10


class StoragePool(Stamped, Base):
    """Learned from its host's facts; `is_available` false: the host does not see it (any more)."""

    __tablename__ = "storage_pool"

    id: Mapped[str] = mapped_column(primary_key=True)
    host_id: Mapped[str] = mapped_column(ForeignKey("host.id", ondelete="CASCADE"))
    name: Mapped[str]
    total_bytes: Mapped[int]
    free_bytes: Mapped[int]
    reserved_bytes: Mapped[int] = mapped_column(server_default="0")
    is_available: Mapped[bool] = mapped_column(server_default="true")
    seen_at: Mapped[datetime]

    __table_args__ = (
        CheckConstraint("name ~ '^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$'", name="name_is_label"),
        CheckConstraint("total_bytes >= 0 AND free_bytes BETWEEN 0 AND total_bytes", name="free_within_total"),
        CheckConstraint("reserved_bytes >= 0", name="reserved_not_negative"),
        Index(None, "host_id", "name", unique=True),
    )

    @property
    def kept_free_bytes(self) -> int:
        """What is never promised, for images and for what was forgotten."""
        return self.total_bytes * KEPT_FREE_PERCENT // 100

    @property
    def is_low(self) -> bool:
        return self.free_bytes < self.kept_free_bytes


ROOM: ColumnElement[int] = (
    func.least(StoragePool.total_bytes - StoragePool.reserved_bytes, StoragePool.free_bytes)
    - StoragePool.total_bytes * KEPT_FREE_PERCENT // 100
)
"""What may be promised: should all that was promised be written one day, and what could be written now."""
