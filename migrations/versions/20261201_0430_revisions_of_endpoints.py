"""revisions of endpoints"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "20261201_0430"
down_revision = "20261201_0200"


def upgrade() -> None:
    op.create_table(
        "revision_traffic",
        sa.Column("gateway", sa.Text(), nullable=False),
        sa.Column("endpoint_id", sa.Text(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("failures", sa.BigInteger(), nullable=False),
        sa.Column("ttft_counts", sa.ARRAY(sa.BigInteger()), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("requests >= 0 AND failures >= 0", name=op.f("revision_traffic_not_negative")),
        sa.PrimaryKeyConstraint("gateway", "endpoint_id", "revision", name=op.f("revision_traffic_pkey")),
        prefixes=["UNLOGGED"],
    )
    op.create_table(
        "endpoint_revision",
        sa.Column("endpoint_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("spec", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("vcpus", sa.BigInteger(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("failure", sa.Text(), server_default="", nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("number > 0", name=op.f("endpoint_revision_number_positive")),
        sa.CheckConstraint("vcpus > 0 AND memory_bytes > 0", name=op.f("endpoint_revision_shape_positive")),
        sa.ForeignKeyConstraint(
            ["endpoint_id"], ["endpoint.id"], name=op.f("endpoint_revision_endpoint_id_fkey"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("endpoint_id", "number", name=op.f("endpoint_revision_pkey")),
    )
    op.add_column("endpoint", sa.Column("revision", sa.Integer(), server_default="1", nullable=False))
    op.add_column("endpoint", sa.Column("rollout", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True))
    op.add_column("replica", sa.Column("revision", sa.Integer(), server_default="1", nullable=False))
    op.execute(
        "INSERT INTO endpoint_revision (endpoint_id, number, model, spec, vcpus, memory_bytes)"
        " SELECT id, 1, model, spec, vcpus, memory_bytes FROM endpoint"
    )
    op.create_foreign_key(
        "replica_endpoint_revision_fkey", "replica", "endpoint_revision", ["endpoint_id", "revision"], ["endpoint_id", "number"]
    )
    op.execute("ALTER TABLE endpoint ADD CONSTRAINT endpoint_revision_positive CHECK ((revision > 0))")
