"""Artifacts that the control plane holds, verified, to ship to hosts."""

from __future__ import annotations

from sqlalchemy import CheckConstraint
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base, Stamped


class StoredArtifact(Stamped, Base):
    """One file of the list of artifacts under its digest; a newer one of the same name takes its place and raises `number`,
    by which the generation that hosts are told rises.
    """

    __tablename__ = "stored_artifact"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    version: Mapped[str]
    architecture: Mapped[str]
    file: Mapped[str]
    sha256: Mapped[str]
    size_bytes: Mapped[int]
    number: Mapped[int] = mapped_column(server_default="1")

    __table_args__ = (
        CheckConstraint("id = name || '-' || architecture", name="one_per_architecture"),
        CheckConstraint("architecture IN ('x86_64', 'aarch64')", name="architecture_known"),
        CheckConstraint("sha256 ~ '^[0-9a-f]{64}$'", name="sha256_form"),
        CheckConstraint("size_bytes > 0", name="has_content"),
        CheckConstraint("number > 0", name="number_is_positive"),
    )
