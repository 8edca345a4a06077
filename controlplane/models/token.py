"""Bearer tokens. The one rule: only the SHA-256 of a token is ever stored."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, LargeBinary, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base, Stamped


class Token(Stamped, Base):
    __tablename__ = "token"
    __table_args__ = (
        UniqueConstraint("secret_sha256", name="token_secret_sha256_key"),
        UniqueConstraint("name", name="token_name_key"),
        CheckConstraint("role IN ('operator', 'member')", name="role_is_known"),
        CheckConstraint("(role = 'member') = (project_id IS NOT NULL)", name="member_has_project"),
        CheckConstraint("octet_length(secret_sha256) = 32", name="secret_is_sha256"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    role: Mapped[str]
    project_id: Mapped[str | None] = mapped_column(ForeignKey("project.id", ondelete="CASCADE"), index=True)
    secret_sha256: Mapped[bytes] = mapped_column(LargeBinary)
    hint: Mapped[str]  # the last four characters, to recognise a token by
    expires_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
