"""Tunnels between hosts: what each host was told and what it said of itself, and the keys' turn.

The one rule: private keys never come here; a public half counts only with the key generation it was made for.
"""

from __future__ import annotations

from datetime import datetime
from ipaddress import IPv4Address, IPv6Address

from sqlalchemy import CheckConstraint, ForeignKey, Text
from sqlalchemy.dialects.postgresql import ARRAY, INET
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base, Stamped


class HostTunnel(Stamped, Base):
    """One host in the mesh. `ipv4` and `ipv6` are its own addresses in the private pools, put on its tunnel interfaces.

    `key_generation_*` 0: no key of that slot is known. `heard_*`: ids of the hosts whose handshake it saw lately.
    """

    __tablename__ = "host_tunnel"

    host_id: Mapped[str] = mapped_column(ForeignKey("host.id", ondelete="CASCADE"), primary_key=True)
    ipv4: Mapped[IPv4Address] = mapped_column(INET, unique=True)
    ipv6: Mapped[IPv6Address] = mapped_column(INET, unique=True)
    public_key_a: Mapped[str] = mapped_column(server_default="")
    public_key_b: Mapped[str] = mapped_column(server_default="")
    key_generation_a: Mapped[int] = mapped_column(server_default="0")
    key_generation_b: Mapped[int] = mapped_column(server_default="0")
    heard_a: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default="{}")
    heard_b: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default="{}")
    generation: Mapped[int] = mapped_column(server_default="1")
    digest: Mapped[str] = mapped_column(server_default="")
    applied_generation: Mapped[int] = mapped_column(server_default="0")
    applied_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("family(ipv4) = 4 AND masklen(ipv4) = 32", name="ipv4_form"),
        CheckConstraint("family(ipv6) = 6 AND masklen(ipv6) = 128", name="ipv6_form"),
        CheckConstraint("(public_key_a = '') = (key_generation_a = 0)", name="key_a_whole"),
        CheckConstraint("(public_key_b = '') = (key_generation_b = 0)", name="key_b_whole"),
        CheckConstraint("applied_generation <= generation", name="applied_not_ahead"),
        CheckConstraint("(applied_generation > 0) <= (applied_at IS NOT NULL)", name="applied_has_time"),
    )


class TunnelRotation(Stamped, Base):
    """The deployment's turn of keys: one row, made at first use. Odd key generations live in slot a, even ones in slot b."""

    __tablename__ = "tunnel_rotation"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    key_generation: Mapped[int] = mapped_column(server_default="1")
    is_rotating: Mapped[bool] = mapped_column(server_default="false")
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("id = 1", name="one_row"),
        CheckConstraint("key_generation >= 1", name="key_generation_positive"),
        CheckConstraint("is_rotating <= (started_at IS NOT NULL)", name="rotating_has_start"),
    )
