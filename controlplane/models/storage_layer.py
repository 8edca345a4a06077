"""What volumes and snapshots are made of on their hosts. The one rule: a layer is there as long as anything stands on it."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base, Stamped


class StorageLayer(Stamped, Base):
    """One file of a pool. `id` is the snapshot for which it was closed, or else the volume that writes to it; `bytes` what it
    holds of its pool: the size that it may reach while it is written, what it takes on disk afterwards.
    """

    __tablename__ = "storage_layer"

    id: Mapped[str] = mapped_column(primary_key=True)
    host_id: Mapped[str] = mapped_column(ForeignKey("host.id", ondelete="CASCADE"))
    pool: Mapped[str]
    bytes: Mapped[int]

    __table_args__ = (CheckConstraint("bytes >= 0", name="bytes_not_negative"), Index(None, "host_id", "pool"))


class StorageLayerUse(Base):
    """Which volume or snapshot (`subject_id`) stands on which layer."""

    __tablename__ = "storage_layer_use"

    subject_id: Mapped[str] = mapped_column(primary_key=True)
    layer_id: Mapped[str] = mapped_column(ForeignKey("storage_layer.id", ondelete="CASCADE"), primary_key=True)

    __table_args__ = (Index(None, "layer_id"),)
