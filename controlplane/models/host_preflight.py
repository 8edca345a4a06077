"""A look at a host that is not ours (yet): who asked for it and what was found. Kept for a day."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base, Versioned


class HostPreflight(Versioned, Base):
    """`fingerprint` is what the host shows; `expected_fingerprint` "" means that nobody knows it yet.

    `report` and `changes` are written together, when the host has been asked.
    """

    __tablename__ = "host_preflight"

    id: Mapped[str] = mapped_column(primary_key=True)
    address: Mapped[str]
    port: Mapped[int]
    login_user: Mapped[str]
    needs_sudo: Mapped[bool] = mapped_column(server_default="false")
    jump: Mapped[str] = mapped_column(server_default="")
    identity_sealed: Mapped[bytes | None]
    config: Mapped[dict[str, Json]] = mapped_column(server_default="{}")
    expected_fingerprint: Mapped[str] = mapped_column(server_default="")
    fingerprint: Mapped[str] = mapped_column(server_default="")
    report: Mapped[dict[str, Json] | None] = mapped_column(JSONB(none_as_null=True))
    changes: Mapped[list[Json]] = mapped_column(server_default="[]")
    finished_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("port BETWEEN 1 AND 65535", name="port_range"),
        CheckConstraint("(report IS NULL) = (finished_at IS NULL)", name="finished_has_report"),
        CheckConstraint("(report IS NULL) OR fingerprint <> ''", name="report_has_fingerprint"),
        CheckConstraint("(report IS NULL) OR identity_sealed IS NULL", name="finished_keeps_no_identity"),
    )
