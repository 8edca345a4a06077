"""Private networks, the pool they are cut from, and what each host was told about routes.

The one rule: prefixes of networks never overlap anywhere in the deployment, so addresses need no overlay.
"""

from __future__ import annotations

from datetime import datetime
from ipaddress import IPv4Network, IPv6Network

from sqlalchemy import CheckConstraint, ForeignKey, Index, text
from sqlalchemy.dialects.postgresql import CIDR, ExcludeConstraint
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base, Stamped, Versioned


class AddressPool(Stamped, Base):
    """The operator's pool of private prefixes: one row, made with defaults at first use."""

    __tablename__ = "address_pool"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    ipv4_cidr: Mapped[IPv4Network] = mapped_column(CIDR)
    ipv6_cidr: Mapped[IPv6Network] = mapped_column(CIDR)
    ipv4_prefix_length: Mapped[int] = mapped_column(server_default="24")

    __table_args__ = (
        CheckConstraint("id = 1", name="one_row"),
        CheckConstraint("family(ipv4_cidr) = 4 AND family(ipv6_cidr) = 6", name="families"),
        CheckConstraint("ipv4_prefix_length BETWEEN masklen(ipv4_cidr) AND 29", name="prefix_length_fits"),
        CheckConstraint("masklen(ipv6_cidr) <= 64", name="ipv6_holds_subnets"),
    )


class Network(Versioned, Base):
    """One private network of a project: an IPv4 prefix and a ULA /64."""

    __tablename__ = "network"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"))
    name: Mapped[str]
    ipv4_cidr: Mapped[IPv4Network] = mapped_column(CIDR)
    ipv6_cidr: Mapped[IPv6Network] = mapped_column(CIDR)
    encryption: Mapped[str] = mapped_column(server_default="none")
    mtu_bytes: Mapped[int] = mapped_column(server_default="1500")
    labels: Mapped[dict[str, Json]] = mapped_column(server_default="{}")

    __table_args__ = (
        CheckConstraint("family(ipv4_cidr) = 4 AND masklen(ipv4_cidr) BETWEEN 8 AND 29", name="ipv4_form"),
        CheckConstraint("family(ipv6_cidr) = 6 AND masklen(ipv6_cidr) = 64", name="ipv6_form"),
        CheckConstraint("encryption IN ('none', 'wireguard')", name="encryption_known"),
        CheckConstraint("mtu_bytes BETWEEN 1280 AND 9216", name="mtu_range"),
        ExcludeConstraint((text("ipv4_cidr inet_ops"), "&&"), using="gist", name="network_ipv4_cidr_excl"),
        ExcludeConstraint((text("ipv6_cidr inet_ops"), "&&"), using="gist", name="network_ipv6_cidr_excl"),
        Index(None, "project_id", "name", unique=True),
    )


class HostRoutes(Stamped, Base):
    """The routes document of one host: what it should say, and which generation the host has taken."""

    __tablename__ = "host_routes"

    host_id: Mapped[str] = mapped_column(ForeignKey("host.id", ondelete="CASCADE"), primary_key=True)
    generation: Mapped[int] = mapped_column(server_default="1")
    digest: Mapped[str]
    applied_generation: Mapped[int] = mapped_column(server_default="0")
    applied_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("applied_generation <= generation", name="applied_not_ahead"),
        CheckConstraint("(applied_generation > 0) <= (applied_at IS NOT NULL)", name="applied_has_time"),
    )
