"""What tells gateways that something they know has changed. The one rule: raised in the transaction of the change itself."""

from __future__ import annotations

from sqlalchemy import CheckConstraint
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base


class GatewayVersion(Base):
    """One row a topic; gateways compare it with what they have once a second, and at once when notified."""

    __tablename__ = "gateway_version"
    __table_args__ = (CheckConstraint("topic IN ('keys', 'routes')", name="topic_known"),)

    topic: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int]
