"""Network interfaces of machines. The one rule: an address is held by its row until the machine is gone from its host."""

from __future__ import annotations

from datetime import datetime
from ipaddress import IPv4Address, IPv6Address

from sqlalchemy import CheckConstraint, ForeignKey, Index, func
from sqlalchemy.dialects.postgresql import INET
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base, Stamped


class Nic(Stamped, Base):
    """One tap (or veth) with a /32 and a /128. `owner_id` is the machine's id: a VM's or a replica's."""

    __tablename__ = "nic"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"))
    network_id: Mapped[str] = mapped_column(ForeignKey("network.id"))
    owner_id: Mapped[str]
    position: Mapped[int] = mapped_column(server_default="0")
    host_id: Mapped[str | None] = mapped_column(ForeignKey("host.id"))
    mac: Mapped[str] = mapped_column(unique=True)
    ipv4: Mapped[IPv4Address] = mapped_column(INET, unique=True)
    ipv6: Mapped[IPv6Address] = mapped_column(INET, unique=True)
    mtu_bytes: Mapped[int] = mapped_column(server_default="1500")

    __table_args__ = (
        CheckConstraint("family(ipv4) = 4 AND masklen(ipv4) = 32", name="ipv4_form"),
        CheckConstraint("family(ipv6) = 6 AND masklen(ipv6) = 128", name="ipv6_form"),
        CheckConstraint("mac ~ '^[0-9a-f][26ae](:[0-9a-f]{2}){5}$'", name="mac_local_unicast"),
        CheckConstraint("mtu_bytes BETWEEN 1280 AND 9216", name="mtu_range"),
        Index(None, "owner_id", "position", unique=True),
        Index(None, "network_id"),
        Index(None, "host_id"),
    )


class RestingAddress(Base):
    """An address that was given back a moment ago: elsewhere there may be somebody who still sends to who had it."""

    __tablename__ = "resting_address"

    address: Mapped[IPv4Address | IPv6Address] = mapped_column(INET, primary_key=True)
    since: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        CheckConstraint("masklen(address) = CASE family(address) WHEN 4 THEN 32 ELSE 128 END", name="address_form"),
    )
