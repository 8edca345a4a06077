"""Who watches which host: leases of the 64 shards of hosts, the watches that are present, and how far each host was heard."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, SmallInteger, func
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base
from controlplane.models.run import SHARDS


class WatchShard(Base):
    __tablename__ = "watch_shard"

    id: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    watch: Mapped[str | None]
    lease_until: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint(f"id >= 0 AND id < {SHARDS}", name="id_exists"),
        CheckConstraint("(watch IS NULL) = (lease_until IS NULL)", name="lease_has_an_end"),
    )


class WatchPresence(Base):
    """A live watch process; the fair share of shards is 64 divided by the present ones. `socket`: where it relays streams."""

    __tablename__ = "watch_presence"

    watch: Mapped[str] = mapped_column(primary_key=True)
    present_until: Mapped[datetime]
    socket: Mapped[str] = mapped_column(server_default="")


class HostCursor(Base):
    """The position in a host's event log up to which signals were sent."""

    __tablename__ = "host_cursor"

    host_id: Mapped[str] = mapped_column(ForeignKey("host.id", ondelete="CASCADE"), primary_key=True)
    log: Mapped[str]
    seq: Mapped[int]
    heard_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (CheckConstraint("log <> '' AND seq >= 0", name="is_a_position"),)
