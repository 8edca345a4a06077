"""Who serves which shard: leases of the 64 shards, and the workers that are present to share them."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, SmallInteger
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base
from controlplane.models.run import SHARDS


class Shard(Base):
    __tablename__ = "shard"

    id: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    worker: Mapped[str | None]
    lease_until: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint(f"id >= 0 AND id < {SHARDS}", name="id_exists"),
        CheckConstraint("(worker IS NULL) = (lease_until IS NULL)", name="lease_has_an_end"),
    )


class WorkerPresence(Base):
    """A live worker process; the fair share of shards is 64 divided by the present ones."""

    __tablename__ = "worker_presence"

    worker: Mapped[str] = mapped_column(primary_key=True)
    present_until: Mapped[datetime]
