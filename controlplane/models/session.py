"""Signed-in browsers. The one rule: a session ends on the server; the cookie alone proves nothing after that."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, LargeBinary, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base, Stamped


class UserSession(Stamped, Base):
    __tablename__ = "session"
    __table_args__ = (
        UniqueConstraint("secret_sha256", name="session_secret_sha256_key"),
        CheckConstraint("octet_length(secret_sha256) = 32", name="secret_is_sha256"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    user_id: Mapped[str] = mapped_column(ForeignKey("user.id", ondelete="CASCADE"), index=True)
    secret_sha256: Mapped[bytes] = mapped_column(LargeBinary)
    user_agent: Mapped[str] = mapped_column(default="", server_default="")
    client_address: Mapped[str] = mapped_column(default="", server_default="")
    expires_at: Mapped[datetime]  # at the latest
    last_used_at: Mapped[datetime]  # to the minute; idle for too long ends it too
