"""Keys that wrap the keys of volumes. The one rule: a volume's key is here only wrapped; its row gone, its data is noise."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base, Stamped


class ProjectKey(Stamped, Base):
    """A project's key-encryption key: an RSA pair whose private half is sealed under the master key. One of a project is not
    retired; retired ones remain only while a wrapped key needs them.
    """

    __tablename__ = "project_key"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id", ondelete="CASCADE"))
    public_key: Mapped[str]
    private_sealed: Mapped[bytes]
    retired_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("public_key <> ''", name="has_public_half"),
        Index("project_key_active_key", "project_id", unique=True, postgresql_where="retired_at IS NULL"),
    )


class VolumeKey(Stamped, Base):
    """One volume's data key under its project's key; `id` is the volume's that it was made for."""

    __tablename__ = "volume_key"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_key_id: Mapped[str] = mapped_column(ForeignKey("project_key.id", ondelete="CASCADE"))
    wrapped: Mapped[str]

    __table_args__ = (CheckConstraint("wrapped <> ''", name="is_wrapped"), Index(None, "project_key_id"))


class VolumeKeyUse(Base):
    """Which volume or snapshot (`subject_id`) needs which key: its own, and those of what it was cloned from."""

    __tablename__ = "volume_key_use"

    subject_id: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("volume_key.id", ondelete="CASCADE"), primary_key=True)

    __table_args__ = (Index(None, "key_id"),)
