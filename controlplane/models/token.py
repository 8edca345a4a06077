"""Bearer tokens. The one rule: only the SHA-256 of a token is ever stored."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Index, LargeBinary, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base, Stamped


class Token(Stamped, Base):
    """`operator`: everything; `admin`, `editor`, `viewer`: one project (`member` is the old word for `editor`); `user`: what
    its person may do. `scopes` narrow it to actions (`vm.*`, `*.list`); empty: no narrower. Names are unique for their
    owner: a person, a project, or the deployment. `maker_id` is the person who made it, kept when they are gone.
    """

    __tablename__ = "token"
    __table_args__ = (
        UniqueConstraint("secret_sha256", name="token_secret_sha256_key"),
        CheckConstraint("role IN ('operator', 'admin', 'editor', 'viewer', 'member', 'user')", name="role_is_known"),
        CheckConstraint("(role IN ('operator', 'user')) = (project_id IS NULL)", name="project_role_has_project"),
        CheckConstraint("(role = 'user') = (user_id IS NOT NULL)", name="personal_has_user"),
        CheckConstraint("octet_length(secret_sha256) = 32", name="secret_is_sha256"),
        CheckConstraint("jsonb_typeof(scopes) = 'array'", name="scopes_are_a_list"),
        Index("token_owner_name_key", text("coalesce(user_id, project_id, '')"), "name", unique=True),
        Index("token_maker_id_idx", "maker_id"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    role: Mapped[str]
    project_id: Mapped[str | None] = mapped_column(ForeignKey("project.id", ondelete="CASCADE"), index=True)
    user_id: Mapped[str | None] = mapped_column(ForeignKey("user.id", ondelete="CASCADE"), index=True)
    maker_id: Mapped[str | None]
    scopes: Mapped[list[Json]] = mapped_column(default=list, server_default="[]")
    secret_sha256: Mapped[bytes] = mapped_column(LargeBinary)
    hint: Mapped[str]  # the last four characters, to recognise a token by
    expires_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
