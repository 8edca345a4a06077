"""Bearer tokens. The one rule: only the SHA-256 of a token is ever stored."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, LargeBinary, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base, Stamped


class Token(Stamped, Base):
    """`operator`: everything; `admin`, `editor`, `viewer`: one project (`member` is the old word for `editor`); `user`: what
    its person may do. `scopes` narrow it to actions (`vm.*`, `*.list`); empty: no narrower.
    """

    __tablename__ = "token"
    __table_args__ = (
        UniqueConstraint("secret_sha256", name="token_secret_sha256_key"),
        UniqueConstraint("name", name="token_name_key"),
        CheckConstraint("role IN ('operator', 'admin', 'editor', 'viewer', 'member', 'user')", name="role_is_known"),
        CheckConstraint("(role IN ('operator', 'user')) = (project_id IS NULL)", name="project_role_has_project"),
        CheckConstraint("(role = 'user') = (user_id IS NOT NULL)", name="personal_has_user"),
        CheckConstraint("octet_length(secret_sha256) = 32", name="secret_is_sha256"),
        CheckConstraint("jsonb_typeof(scopes) = 'array'", name="scopes_are_a_list"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    role: Mapped[str]
    project_id: Mapped[str | None] = mapped_column(ForeignKey("project.id", ondelete="CASCADE"), index=True)
    user_id: Mapped[str | None] = mapped_column(ForeignKey("user.id", ondelete="CASCADE"), index=True)
    scopes: Mapped[list[Json]] = mapped_column(default=list, server_default="[]")
    secret_sha256: Mapped[bytes] = mapped_column(LargeBinary)
    hint: Mapped[str]  # the last four characters, to recognise a token by
    expires_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
