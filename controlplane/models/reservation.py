"""What machines hold of their hosts. The one rule: written only by `controlplane.placement`, beside the host's sums."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base


class Reservation(Base):
    """What one machine (`subject_id`: a VM or a replica) holds of its host. The host's sums are kept beside these rows."""

    __tablename__ = "reservation"

    subject_id: Mapped[str] = mapped_column(primary_key=True)
    host_id: Mapped[str] = mapped_column(ForeignKey("host.id"))
    vcpus: Mapped[int]
    memory_bytes: Mapped[int]

    __table_args__ = (
        CheckConstraint("vcpus > 0 AND memory_bytes > 0", name="sizes_positive"),
        Index(None, "host_id"),
    )
