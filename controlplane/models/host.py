"""Hosts: how to reach one, what it is, what of it may be given away, and what already is.

The one rule: `reserved_*` are the sums of the host's reservations and change only by `controlplane.placement`.
"""

from __future__ import annotations

from datetime import datetime
from ipaddress import IPv4Address, IPv6Address

from sqlalchemy import CheckConstraint, Index, Text, text
from sqlalchemy.dialects.postgresql import ARRAY, INET, JSONB
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base, Versioned


class Host(Versioned, Base):
    """States: `enrolling` (being set up or repaired), `ready`, `removing`. `is_cordoned` keeps new machines away.

    `login_user`, `needs_sudo`, `jump` and `identity_sealed` are the first login's; the identity is dropped when the host is
    ready. `report` is the last preflight's, `changes` what enrolment changed on the host. `is_forgotten`: removed without
    asking the host. `bgp`: routers that are told of addresses held here, their passwords sealed beside. A reboot is due while
    `rebooted_generation` is behind `reboot_generation`. `underlay_*`: where other hosts' tunnels reach it, on a data interface
    where one was declared.
    """

    __tablename__ = "host"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    state: Mapped[str] = mapped_column(server_default="enrolling")
    is_cordoned: Mapped[bool] = mapped_column(server_default="false")
    removing_at: Mapped[datetime | None]
    roles: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default="{compute}")
    labels: Mapped[dict[str, Json]] = mapped_column(server_default="{}")
    location: Mapped[str] = mapped_column(server_default="")

    address: Mapped[str]
    port: Mapped[int] = mapped_column(server_default="22")
    login_user: Mapped[str] = mapped_column(server_default="root")
    needs_sudo: Mapped[bool] = mapped_column(server_default="false")
    jump: Mapped[str] = mapped_column(server_default="")
    host_key_fingerprint: Mapped[str] = mapped_column(server_default="")
    ssh_key_sealed: Mapped[bytes | None]
    ssh_public_key: Mapped[str] = mapped_column(server_default="")
    identity_sealed: Mapped[bytes | None]
    reboot_generation: Mapped[int] = mapped_column(server_default="0")
    rebooted_generation: Mapped[int] = mapped_column(server_default="0")
    is_forgotten: Mapped[bool] = mapped_column(server_default="false")
    config: Mapped[dict[str, Json]] = mapped_column(server_default="{}")
    data_interface: Mapped[str] = mapped_column(server_default="")
    bgp: Mapped[dict[str, Json] | None] = mapped_column(JSONB(none_as_null=True))
    bgp_passwords_sealed: Mapped[bytes | None]
    report: Mapped[dict[str, Json] | None] = mapped_column(JSONB(none_as_null=True))
    changes: Mapped[list[Json]] = mapped_column(server_default="[]")

    link: Mapped[str] = mapped_column(server_default="unknown")
    link_changed_at: Mapped[datetime | None]
    facts: Mapped[dict[str, Json] | None] = mapped_column(JSONB(none_as_null=True))
    facts_at: Mapped[datetime | None]
    agent_version: Mapped[str] = mapped_column(server_default="")
    architecture: Mapped[str] = mapped_column(server_default="")
    machine_drivers: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default="{}")
    data_ipv4: Mapped[IPv4Address | None] = mapped_column(INET)
    data_ipv6: Mapped[IPv6Address | None] = mapped_column(INET)
    tunnel_driver: Mapped[str] = mapped_column(server_default="")
    underlay_ipv4: Mapped[IPv4Address | None] = mapped_column(INET)
    underlay_ipv6: Mapped[IPv6Address | None] = mapped_column(INET)
    underlay_mtu_bytes: Mapped[int | None]

    allocatable_vcpus: Mapped[int] = mapped_column(server_default="0")
    allocatable_memory_bytes: Mapped[int] = mapped_column(server_default="0")
    reserved_vcpus: Mapped[int] = mapped_column(server_default="0")
    reserved_memory_bytes: Mapped[int] = mapped_column(server_default="0")
    conditions: Mapped[list[Json]] = mapped_column(server_default="[]")

    __table_args__ = (
        CheckConstraint("state IN ('enrolling', 'ready', 'removing')", name="state_known"),
        CheckConstraint("(state = 'ready') <= (facts IS NOT NULL AND ssh_key_sealed IS NOT NULL)", name="ready_has_facts"),
        CheckConstraint("(state = 'removing') = (removing_at IS NOT NULL)", name="removing_has_time"),
        CheckConstraint("(facts IS NULL) = (facts_at IS NULL)", name="facts_have_time"),
        CheckConstraint("link IN ('unknown', 'up', 'lost')", name="link_known"),
        CheckConstraint("(link = 'unknown') = (link_changed_at IS NULL)", name="link_has_time"),
        CheckConstraint("port BETWEEN 1 AND 65535", name="port_range"),
        CheckConstraint("(ssh_key_sealed IS NULL) = (ssh_public_key = '')", name="ssh_key_whole"),
        CheckConstraint("(state = 'ready') <= (identity_sealed IS NULL)", name="ready_keeps_no_identity"),
        CheckConstraint("(bgp_passwords_sealed IS NOT NULL) <= (bgp IS NOT NULL)", name="bgp_passwords_of_peers"),
        CheckConstraint("is_forgotten <= (state = 'removing')", name="forgotten_when_removing"),
        CheckConstraint("allocatable_vcpus >= 0 AND allocatable_memory_bytes >= 0", name="allocatable_not_negative"),
        CheckConstraint("reserved_vcpus >= 0 AND reserved_memory_bytes >= 0", name="reserved_not_negative"),
        CheckConstraint("family(data_ipv4) = 4 AND family(data_ipv6) = 6", name="data_families"),
        CheckConstraint("tunnel_driver IN ('', 'kernel', 'userspace')", name="tunnel_driver_known"),
        CheckConstraint("family(underlay_ipv4) = 4 AND family(underlay_ipv6) = 6", name="underlay_families"),
        Index("host_ring_idx", text("md5(id)")),
        Index("host_address_key", "address", "port", unique=True),
    )

    @property
    def wanted(self) -> dict[str, Json]:
        """What the operator asked for."""
        return {
            "address": self.address,
            "port": self.port,
            "roles": [*self.roles],
            "labels": self.labels,
            "location": self.location,
            "cordoned": self.is_cordoned,
            "data_interface": self.data_interface,
            "bgp": self.bgp,
        }

    @property
    def observed(self) -> dict[str, Json]:
        """What is known of the host now."""
        return {
            "generation": self.observed_generation,
            "link": self.link,
            "agent_version": self.agent_version,
            "architecture": self.architecture,
            "machine_drivers": [*self.machine_drivers],
            "data_ipv4": str(self.data_ipv4) if self.data_ipv4 else None,
            "data_ipv6": str(self.data_ipv6) if self.data_ipv6 else None,
            "tunnel_driver": self.tunnel_driver or None,
            "allocatable": {"vcpus": self.allocatable_vcpus, "memory_bytes": self.allocatable_memory_bytes},
            "reserved": {"vcpus": self.reserved_vcpus, "memory_bytes": self.reserved_memory_bytes},
        }
