"""Programs that wait for a person to let them in (RFC 8628). The one rule: the code that a person types is worth nothing
without the secret that the program keeps.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Index, LargeBinary, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base, Stamped


class Login(Stamped, Base):
    """`user_id` is who answered; the row goes when the program has its token, or with its time."""

    __tablename__ = "login"
    __table_args__ = (
        UniqueConstraint("secret_sha256", name="login_secret_sha256_key"),
        UniqueConstraint("user_code", name="login_user_code_key"),
        CheckConstraint("octet_length(secret_sha256) = 32", name="secret_is_sha256"),
        CheckConstraint("state IN ('pending', 'approved', 'denied')", name="state_is_known"),
        CheckConstraint("(state = 'pending') = (user_id IS NULL)", name="answer_has_a_person"),
        Index("login_client_address_idx", "client_address"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    secret_sha256: Mapped[bytes] = mapped_column(LargeBinary)
    user_code: Mapped[str]
    client_name: Mapped[str]
    client_address: Mapped[str]
    state: Mapped[str] = mapped_column(default="pending", server_default="pending")
    user_id: Mapped[str | None] = mapped_column(ForeignKey("user.id", ondelete="CASCADE"), index=True)
    expires_at: Mapped[datetime]
    polled_at: Mapped[datetime | None]
