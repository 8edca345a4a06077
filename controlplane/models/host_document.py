"""What each host is told of firewalls, policy, addresses, load balancers and tunnels: one row a document and host.

The one rule: planners write rows and never speak to hosts; one run a host (`host_documents`) says what is stale. A row stays
while its object lives, wanted on the host or not, because its generation must only rise.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base, Stamped


class HostDocument(Stamped, Base):
    """`document`: the wanted document without its generation. `is_final`: the row goes when the host has purged it.

    `observed` is what the host answered to the applied generation, `failure` (code) and `detail` why it has not carried
    out the present one.
    """

    __tablename__ = "host_document"

    host_id: Mapped[str] = mapped_column(ForeignKey("host.id", ondelete="CASCADE"), primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    object_id: Mapped[str] = mapped_column(primary_key=True)
    generation: Mapped[int] = mapped_column(server_default="1")
    is_wanted: Mapped[bool] = mapped_column(server_default="true")
    is_final: Mapped[bool] = mapped_column(server_default="false")
    document: Mapped[dict[str, Json]]
    digest: Mapped[str]
    applied_generation: Mapped[int] = mapped_column(server_default="0")
    applied_at: Mapped[datetime | None]
    observed: Mapped[dict[str, Json]] = mapped_column(server_default="{}")
    failure: Mapped[str] = mapped_column(server_default="")
    detail: Mapped[str] = mapped_column(server_default="")

    __table_args__ = (
        CheckConstraint(
            "kind IN ('policy', 'firewall', 'tunnel', 'address', 'loadbalancer', 'notices', 'edgeways')", name="kind_known"
        ),
        CheckConstraint("applied_generation <= generation", name="applied_not_ahead"),
        CheckConstraint("(applied_generation > 0) <= (applied_at IS NOT NULL)", name="applied_has_time"),
        CheckConstraint("is_final <= (NOT is_wanted)", name="final_is_not_wanted"),
        Index(None, "kind", "object_id"),
        Index("host_document_stale_idx", "host_id", postgresql_where="applied_generation < generation"),
    )
