"""Firewalls: rules that apply to the interfaces of networks and machines. A denial wins over an allowance.

The one rule: prefixes are stored without host bits and do not overlap within a rule; what a reference to a network or another
firewall means is looked up whenever a host is told.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey, Index, Text, UniqueConstraint
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base, Stamped, Versioned


class Firewall(Versioned, Base):
    """`owner_id`: the endpoint or load balancer that keeps it; such a one is not the tenant's to change, nor listed."""

    __tablename__ = "firewall"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"))
    owner_id: Mapped[str | None] = mapped_column(unique=True)
    name: Mapped[str]
    description: Mapped[str] = mapped_column(server_default="")
    labels: Mapped[dict[str, Json]] = mapped_column(server_default="{}")

    __table_args__ = (
        CheckConstraint("observed_generation <= generation", name="observed_not_ahead"),
        Index("firewall_project_id_name_idx", "project_id", "name", unique=True, postgresql_where="owner_id IS NULL"),
    )


class FirewallRule(Stamped, Base):
    """The far end is what `far_end` says: `cidrs`, a `network`, another firewall (`firewall`), or hosts of the operator:
    `gateways`, `edges` (owned firewalls only). Ports 0 and 0: every port.
    """

    __tablename__ = "firewall_rule"

    id: Mapped[str] = mapped_column(primary_key=True)
    firewall_id: Mapped[str] = mapped_column(ForeignKey("firewall.id", ondelete="CASCADE"))
    position: Mapped[int] = mapped_column(server_default="0")
    direction: Mapped[str]
    action: Mapped[str]
    protocol: Mapped[str]
    port_first: Mapped[int] = mapped_column(server_default="0")
    port_last: Mapped[int] = mapped_column(server_default="0")
    far_end: Mapped[str]
    cidrs: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default="{}")
    network_id: Mapped[str | None] = mapped_column(ForeignKey("network.id"))
    peer_id: Mapped[str | None] = mapped_column(ForeignKey("firewall.id"))

    __table_args__ = (
        CheckConstraint("direction IN ('ingress', 'egress')", name="direction_known"),
        CheckConstraint("action IN ('allow', 'deny')", name="action_known"),
        CheckConstraint("protocol IN ('tcp', 'udp', 'icmp', 'any')", name="protocol_known"),
        CheckConstraint("far_end IN ('cidrs', 'network', 'firewall', 'gateways', 'edges')", name="far_end_known"),
        CheckConstraint("(far_end = 'cidrs') = (cardinality(cidrs) > 0)", name="cidrs_when_meant"),
        CheckConstraint("(far_end = 'network') = (network_id IS NOT NULL)", name="network_when_meant"),
        CheckConstraint("(far_end = 'firewall') = (peer_id IS NOT NULL)", name="peer_when_meant"),
        CheckConstraint(
            "(port_first = 0 AND port_last = 0) OR (port_first BETWEEN 1 AND port_last AND port_last <= 65535)",
            name="port_range",
        ),
        CheckConstraint("protocol IN ('tcp', 'udp') OR port_first = 0", name="ports_of_tcp_and_udp"),
        Index(None, "firewall_id"),
        Index(None, "network_id"),
        Index(None, "peer_id"),
    )


class FirewallAttachment(Stamped, Base):
    """To a network (all machines in it) or to one machine (all its interfaces)."""

    __tablename__ = "firewall_attachment"

    id: Mapped[int] = mapped_column(primary_key=True)
    firewall_id: Mapped[str] = mapped_column(ForeignKey("firewall.id"))
    network_id: Mapped[str | None] = mapped_column(ForeignKey("network.id", ondelete="CASCADE"))
    vm_id: Mapped[str | None] = mapped_column(ForeignKey("vm.id", ondelete="CASCADE"))

    __table_args__ = (
        CheckConstraint("num_nonnulls(network_id, vm_id) = 1", name="one_target"),
        UniqueConstraint("firewall_id", "network_id", "vm_id", postgresql_nulls_not_distinct=True),
        Index(None, "network_id"),
        Index(None, "vm_id"),
    )
