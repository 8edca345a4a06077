"""Until when a host may count on holding alone what it was given to hold: addresses that are announced by ARP.

The one rule: nothing of it is given to another host before the lease is over, unless the host itself says to have let go.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, func
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base


class HolderLease(Base):
    """One row a host, renewed by the watch that holds its channel, before the host is granted as much."""

    __tablename__ = "holder_lease"

    host_id: Mapped[str] = mapped_column(ForeignKey("host.id", ondelete="CASCADE"), primary_key=True)
    lease_until: Mapped[datetime] = mapped_column(server_default=func.now())
