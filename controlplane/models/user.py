"""People. The one rule: what proves who they are is stored as a digest or sealed, never as it was typed."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, LargeBinary, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base, Versioned


class User(Versioned, Base):
    """`sso_subject` is who the provider `sso_issuer` says they are. `link_sha256` is of the one-time link by which a person
    sets a password; `totp_last_step` refuses a code twice.
    """

    __tablename__ = "user"
    __table_args__ = (
        UniqueConstraint("name", name="user_name_key"),
        UniqueConstraint("link_sha256", name="user_link_sha256_key"),
        UniqueConstraint("sso_issuer", "sso_subject", name="user_sso_key"),
        CheckConstraint("(sso_issuer IS NULL) = (sso_subject IS NULL)", name="sso_is_whole"),
        CheckConstraint("name ~ '^[a-z0-9]([a-z0-9._@+-]{0,126}[a-z0-9])?$'", name="name_is_plain"),
        CheckConstraint("(link_sha256 IS NULL) = (link_expires_at IS NULL)", name="link_expires"),
        CheckConstraint("NOT has_totp OR totp_sealed IS NOT NULL", name="totp_has_secret"),
        CheckConstraint("failed_sign_ins >= 0", name="failures_are_counted"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    display_name: Mapped[str] = mapped_column(default="", server_default="")
    is_operator: Mapped[bool] = mapped_column(default=False, server_default="false")
    is_disabled: Mapped[bool] = mapped_column(default=False, server_default="false")
    password_hash: Mapped[str | None]
    link_sha256: Mapped[bytes | None] = mapped_column(LargeBinary)
    link_expires_at: Mapped[datetime | None]
    sso_issuer: Mapped[str | None]
    sso_subject: Mapped[str | None]
    has_totp: Mapped[bool] = mapped_column(default=False, server_default="false")
    totp_sealed: Mapped[bytes | None] = mapped_column(LargeBinary)
    totp_last_step: Mapped[int] = mapped_column(default=0, server_default="0")
    failed_sign_ins: Mapped[int] = mapped_column(default=0, server_default="0")
    failed_at: Mapped[datetime | None]
    locked_until: Mapped[datetime | None]

    @property
    def has_password(self) -> bool:
        """Whether somebody set one; until then only the link opens the account."""
        return self.password_hash is not None
