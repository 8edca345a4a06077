"""The project: the wall between tenants. Deleting one is refused by the foreign keys of what lives in it."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, UniqueConstraint
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base, Versioned


class Project(Versioned, Base):
    __tablename__ = "project"
    __table_args__ = (
        UniqueConstraint("name", name="project_name_key"),
        CheckConstraint("name ~ '^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$'", name="name_is_dns_label"),
        CheckConstraint("jsonb_typeof(quota) = 'object'", name="quota_is_object"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    description: Mapped[str] = mapped_column(default="", server_default="")
    labels: Mapped[dict[str, Json]] = mapped_column(default=dict, server_default="{}")
    allow_containers: Mapped[bool] = mapped_column(default=False, server_default="false")
    quota: Mapped[dict[str, int]] = mapped_column(JSONB, default=dict, server_default="{}")
    """By resource the most that it may have; what is not named has no limit."""
