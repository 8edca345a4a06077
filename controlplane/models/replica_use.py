"""Which replicas gateways have open answers at. The one rule: a row says "at work", its absence says nothing is open.

Unlogged: after a crash of the database the gateways write it anew within a second.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Index, func
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base


class ReplicaUse(Base):
    """One row for each gateway instance and replica; taken away by the gateway when its last open answer there has ended."""

    __tablename__ = "replica_use"
    __table_args__ = (Index(None, "replica_id"), {"prefixes": ["UNLOGGED"]})

    gateway: Mapped[str] = mapped_column(primary_key=True)
    replica_id: Mapped[str] = mapped_column(primary_key=True)
    since: Mapped[datetime] = mapped_column(server_default=func.now())
