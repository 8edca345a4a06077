"""What tells gateways that something they know has changed. The one rule: raised in the transaction of the change itself."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base


class GatewayVersion(Base):
    """One row a topic; gateways compare it with what they have once a second, and at once when notified."""

    __tablename__ = "gateway_version"
    __table_args__ = (CheckConstraint("topic IN ('keys', 'routes')", name="topic_known"),)

    topic: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int]


class GatewayPresence(Base):
    """Gateways that are alive: with Redis away each has its share of a limit. Unlogged: it is true for seconds.

    `routes` is the version of that topic by which it chooses replicas from now on.
    """

    __tablename__ = "gateway_presence"
    __table_args__ = ({"prefixes": ["UNLOGGED"]},)

    gateway: Mapped[str] = mapped_column(primary_key=True)
    at: Mapped[datetime]
    routes: Mapped[int] = mapped_column(server_default="0")
