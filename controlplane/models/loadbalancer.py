"""Load balancers: listeners at addresses, backends behind them, edge hosts that carry both.

The one rule: what a tenant wants of a backend is its row; what edges see of it is `observed`, told apart by host.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Index, UniqueConstraint
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base, Stamped, Versioned


class Loadbalancer(Versioned, Base):
    """States: `active`, `deleting` (open flows end until `deleting_at` + `drain_seconds`). `departed`: backends that left
    last, so that their leaving moved nobody else's flows. `observed`: by host id, what it said.
    """

    __tablename__ = "loadbalancer"

    id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("project.id"))
    name: Mapped[str]
    description: Mapped[str] = mapped_column(server_default="")
    labels: Mapped[dict[str, Json]] = mapped_column(server_default="{}")
    network_id: Mapped[str | None] = mapped_column(ForeignKey("network.id"))
    edges: Mapped[int] = mapped_column(server_default="2")
    algorithm: Mapped[str] = mapped_column(server_default="hash")
    hash_on: Mapped[str] = mapped_column(server_default="source_port")
    profile: Mapped[str] = mapped_column(server_default="default")
    probe: Mapped[dict[str, Json] | None] = mapped_column(JSONB(none_as_null=True))
    circuit: Mapped[dict[str, Json] | None] = mapped_column(JSONB(none_as_null=True))
    new_connections_per_second_per_source: Mapped[int] = mapped_column(server_default="0")
    connections_per_source: Mapped[int] = mapped_column(server_default="0")
    drain_seconds: Mapped[int] = mapped_column(server_default="30")
    slow_start_seconds: Mapped[int] = mapped_column(server_default="0")
    state: Mapped[str] = mapped_column(server_default="active")
    deleting_at: Mapped[datetime | None]
    departed: Mapped[list[Json]] = mapped_column(server_default="[]")
    observed: Mapped[dict[str, Json]] = mapped_column(server_default="{}")

    __table_args__ = (
        CheckConstraint("state IN ('active', 'deleting')", name="state_known"),
        CheckConstraint("(state = 'deleting') = (deleting_at IS NOT NULL)", name="deleting_has_time"),
        CheckConstraint("algorithm IN ('hash', 'round_robin', 'random')", name="algorithm_known"),
        CheckConstraint("hash_on IN ('source', 'source_port')", name="hash_on_known"),
        CheckConstraint("edges BETWEEN 1 AND 16", name="edges_range"),
        CheckConstraint("drain_seconds >= 0 AND slow_start_seconds >= 0", name="seconds_not_negative"),
        CheckConstraint("observed_generation <= generation", name="observed_not_ahead"),
        Index(None, "project_id", "name", unique=True),
        Index(None, "network_id"),
    )


class LoadbalancerListener(Base):
    __tablename__ = "loadbalancer_listener"

    loadbalancer_id: Mapped[str] = mapped_column(ForeignKey("loadbalancer.id", ondelete="CASCADE"), primary_key=True)
    protocol: Mapped[str] = mapped_column(primary_key=True)
    port: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    target_port: Mapped[int]

    __table_args__ = (
        CheckConstraint("protocol IN ('tcp', 'udp')", name="protocol_known"),
        CheckConstraint("port BETWEEN 1 AND 65535 AND target_port BETWEEN 1 AND 65535", name="port_range"),
    )


class LoadbalancerBackend(Stamped, Base):
    """A machine's interface, or an endpoint: then each of its ready replicas is one. `ejected_until` ends by itself."""

    __tablename__ = "loadbalancer_backend"

    id: Mapped[str] = mapped_column(primary_key=True)
    loadbalancer_id: Mapped[str] = mapped_column(ForeignKey("loadbalancer.id", ondelete="CASCADE"))
    nic_id: Mapped[str | None] = mapped_column(ForeignKey("nic.id", ondelete="CASCADE"))
    endpoint_id: Mapped[str | None] = mapped_column(ForeignKey("endpoint.id", ondelete="CASCADE"))
    weight: Mapped[int] = mapped_column(server_default="1")
    is_draining: Mapped[bool] = mapped_column(server_default="false")
    draining_at: Mapped[datetime | None]
    ejected_until: Mapped[datetime | None]
    ejected_reason: Mapped[str] = mapped_column(server_default="")

    __table_args__ = (
        CheckConstraint("num_nonnulls(nic_id, endpoint_id) = 1", name="one_target"),
        CheckConstraint("weight BETWEEN 1 AND 256", name="weight_range"),
        CheckConstraint("is_draining = (draining_at IS NOT NULL)", name="draining_has_time"),
        UniqueConstraint("loadbalancer_id", "nic_id", "endpoint_id", postgresql_nulls_not_distinct=True),
        Index(None, "nic_id"),
        Index(None, "endpoint_id"),
    )
