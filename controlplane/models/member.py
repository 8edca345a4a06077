"""Who has which role in which project."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column, relationship

from controlplane.models.base import Base, Versioned
from controlplane.models.user import User


class Member(Versioned, Base):
    __tablename__ = "member"
    __table_args__ = (
        UniqueConstraint("project_id", "user_id", name="member_project_id_user_id_key"),
        CheckConstraint("role IN ('admin', 'editor', 'viewer')", name="role_is_known"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id", ondelete="CASCADE"))
    user_id: Mapped[str] = mapped_column(ForeignKey("user.id", ondelete="CASCADE"), index=True)
    role: Mapped[str]
    user: Mapped[User] = relationship(lazy="joined", innerjoin=True)

    @property
    def user_name(self) -> str:
        return self.user.name
