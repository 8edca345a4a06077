"""Public addresses: the operator's pools, and what projects have reserved of them.

The one rule: an address is held by its row until it is released; machines and load balancers come and go under it.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from sqlalchemy import CheckConstraint, ForeignKey, Index, Text, UniqueConstraint, text
from sqlalchemy.dialects.postgresql import ARRAY, CIDR, INET, ExcludeConstraint
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base, Versioned


class Pool(Versioned, Base):
    """A prefix that is routed or bridged to the hosts. `announce`: how the network outside learns who holds an address."""

    __tablename__ = "pool"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    description: Mapped[str] = mapped_column(server_default="")
    labels: Mapped[dict[str, Json]] = mapped_column(server_default="{}")
    cidr: Mapped[IPv4Network | IPv6Network] = mapped_column(CIDR)
    excluded: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default="{}")
    announce: Mapped[str] = mapped_column(server_default="arp")

    __table_args__ = (
        CheckConstraint("announce IN ('none', 'arp', 'bgp')", name="announce_known"),
        ExcludeConstraint((text("cidr inet_ops"), "&&"), using="gist", name="pool_cidr_excl"),
    )

    @property
    def family(self) -> str:
        return f"ipv{self.cidr.version}"


class Address(Versioned, Base):
    """Attached to a machine (`vm_id`: 1:1 translation on its host), to a load balancer, or to nothing.

    `holder_id`: of the edge hosts the one that announces it for a load balancer, where only one may.
    """

    __tablename__ = "address"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"))
    name: Mapped[str]
    labels: Mapped[dict[str, Json]] = mapped_column(server_default="{}")
    pool_id: Mapped[str] = mapped_column(ForeignKey("pool.id"))
    address: Mapped[IPv4Address | IPv6Address] = mapped_column(INET)
    vm_id: Mapped[str | None] = mapped_column(ForeignKey("vm.id", ondelete="SET NULL"))
    loadbalancer_id: Mapped[str | None] = mapped_column(ForeignKey("loadbalancer.id", ondelete="SET NULL"))
    holder_id: Mapped[str | None] = mapped_column(ForeignKey("host.id", ondelete="SET NULL"))

    __table_args__ = (
        UniqueConstraint("address"),
        CheckConstraint("masklen(address) = CASE family(address) WHEN 4 THEN 32 ELSE 128 END", name="address_is_single"),
        CheckConstraint("num_nonnulls(vm_id, loadbalancer_id) <= 1", name="one_target"),
        CheckConstraint("(holder_id IS NOT NULL) <= (loadbalancer_id IS NOT NULL)", name="holder_for_loadbalancer"),
        CheckConstraint("observed_generation <= generation", name="observed_not_ahead"),
        Index(None, "project_id", "name", unique=True),
        Index(None, "pool_id"),
        Index("address_vm_id_family_idx", "vm_id", text("family(address)"), unique=True),
        Index(None, "loadbalancer_id"),
    )

    @property
    def family(self) -> str:
        return f"ipv{self.address.version}"
