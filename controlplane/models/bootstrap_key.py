"""The deployment's own SSH key for first logins. One row; its private half is sealed."""

from __future__ import annotations

from sqlalchemy import CheckConstraint
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base, Stamped


class BootstrapKey(Stamped, Base):
    """An operator puts `public_key` on a new host; it is used to enrol, repair and remove, never for anything else."""

    __tablename__ = "bootstrap_key"

    id: Mapped[str] = mapped_column(primary_key=True, server_default="bootstrap")
    public_key: Mapped[str]
    private_key_sealed: Mapped[bytes]

    __table_args__ = (CheckConstraint("id = 'bootstrap'", name="only_one"),)
