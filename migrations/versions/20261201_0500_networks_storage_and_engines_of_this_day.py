"""networks, storage and engines of this day"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "20261201_0500"
down_revision = "20261201_0430"


def upgrade() -> None:
    op.create_table(
        "attempt",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("began_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("failed_sign_ins", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("failed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("locked_until", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("key ~ '^(address|name) '", name=op.f("attempt_key_says_of_what")),
        sa.CheckConstraint("(failed_sign_ins = 0) = (failed_at IS NULL)", name=op.f("attempt_failures_have_a_time")),
        sa.CheckConstraint("failed_sign_ins >= 0", name=op.f("attempt_failures_are_counted")),
        sa.PrimaryKeyConstraint("key", name=op.f("attempt_pkey")),
    )
    op.create_index("attempt_began_at_idx", "attempt", ["began_at"], unique=False)
    op.create_table(
        "resting_address",
        sa.Column("address", postgresql.INET(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "masklen(address) = CASE family(address) WHEN 4 THEN 32 ELSE 128 END", name=op.f("resting_address_address_form")
        ),
        sa.PrimaryKeyConstraint("address", name=op.f("resting_address_pkey")),
    )
    op.create_table(
        "login",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("secret_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("user_code", sa.Text(), nullable=False),
        sa.Column("client_name", sa.Text(), nullable=False),
        sa.Column("client_address", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), server_default="pending", nullable=False),
        sa.Column("user_id", sa.Text(), nullable=True),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("polled_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("(state = 'pending') = (user_id IS NULL)", name=op.f("login_answer_has_a_person")),
        sa.CheckConstraint("state IN ('pending', 'approved', 'denied')", name=op.f("login_state_is_known")),
        sa.CheckConstraint("octet_length(secret_sha256) = 32", name=op.f("login_secret_is_sha256")),
        sa.ForeignKeyConstraint(["user_id"], ["user.id"], name=op.f("login_user_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("login_pkey")),
        sa.UniqueConstraint("secret_sha256", name="login_secret_sha256_key"),
        sa.UniqueConstraint("user_code", name="login_user_code_key"),
    )
    op.create_index("login_client_address_idx", "login", ["client_address"], unique=False)
    op.create_index(op.f("login_user_id_idx"), "login", ["user_id"], unique=False)
    op.create_table(
        "storage_layer",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("host_id", sa.Text(), nullable=False),
        sa.Column("pool", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("bytes >= 0", name=op.f("storage_layer_bytes_not_negative")),
        sa.ForeignKeyConstraint(["host_id"], ["host.id"], name=op.f("storage_layer_host_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("storage_layer_pkey")),
    )
    op.create_index(op.f("storage_layer_host_id_pool_idx"), "storage_layer", ["host_id", "pool"], unique=False)
    op.create_table(
        "storage_layer_use",
        sa.Column("subject_id", sa.Text(), nullable=False),
        sa.Column("layer_id", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["layer_id"], ["storage_layer.id"], name=op.f("storage_layer_use_layer_id_fkey"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("subject_id", "layer_id", name=op.f("storage_layer_use_pkey")),
    )
    op.create_index(op.f("storage_layer_use_layer_id_idx"), "storage_layer_use", ["layer_id"], unique=False)
    op.execute(
        "INSERT INTO storage_layer (id, host_id, pool, bytes)"
        " SELECT id, host_id, pool, pool_bytes FROM volume WHERE host_id IS NOT NULL"
        " UNION ALL SELECT id, host_id, pool, pool_bytes FROM snapshot"
    )
    op.execute(
        "INSERT INTO storage_layer_use (subject_id, layer_id) SELECT id, id FROM storage_layer"
        " UNION ALL SELECT v.id, s.id FROM volume v JOIN snapshot s ON s.volume_id = v.id OR s.id = v.snapshot_id"
    )
    op.add_column("gateway_presence", sa.Column("routes", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("host", sa.Column("bgp", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True))
    op.add_column("host", sa.Column("bgp_passwords_sealed", sa.LargeBinary(), nullable=True))
    op.add_column("image_file", sa.Column("url", sa.Text(), nullable=True))
    op.add_column("image_file", sa.Column("fetched_bytes", sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("model", sa.Column("fetched_bytes", sa.BigInteger(), server_default="0", nullable=False))
    op.drop_column("snapshot", "pool_bytes")
    op.add_column("token", sa.Column("maker_id", sa.Text(), nullable=True))
    op.drop_constraint(op.f("token_name_key"), "token", type_="unique")
    op.create_index("token_maker_id_idx", "token", ["maker_id"], unique=False)
    op.create_index(
        "token_owner_name_key", "token", [sa.literal_column("coalesce(user_id, project_id, '')"), "name"], unique=True
    )
    op.add_column("user", sa.Column("sso_issuer", sa.Text(), nullable=True))
    op.add_column("user", sa.Column("sso_subject", sa.Text(), nullable=True))
    op.add_column("user", sa.Column("failed_at", sa.DateTime(timezone=True), nullable=True))
    op.create_unique_constraint("user_sso_key", "user", ["sso_issuer", "sso_subject"])
    op.drop_column("volume", "pool_bytes")
    op.execute("ALTER TABLE host_document DROP CONSTRAINT host_document_kind_known")
    op.execute("ALTER TABLE image_file DROP CONSTRAINT image_file_size_not_negative")
    op.execute('ALTER TABLE "user" ADD CONSTRAINT user_sso_is_whole CHECK (((sso_issuer IS NULL) = (sso_subject IS NULL)))')
    op.execute(
        "ALTER TABLE host ADD CONSTRAINT host_bgp_passwords_of_peers CHECK (((bgp_passwords_sealed IS NOT NULL) <= (bgp IS NOT NULL)))"
    )
    op.execute(
        "ALTER TABLE host_document ADD CONSTRAINT host_document_kind_known CHECK ((kind = ANY (ARRAY['policy'::text, 'firewall'::text, 'tunnel'::text, 'address'::text, 'loadbalancer'::text, 'notices'::text, 'edgeways'::text])))"
    )
    op.execute(
        "ALTER TABLE image_file ADD CONSTRAINT image_file_size_not_negative CHECK (((size_bytes >= 0) AND (fetched_bytes >= 0)))"
    )
    op.execute("ALTER TABLE snapshot ADD CONSTRAINT snapshot_size_positive CHECK ((size_bytes >= 1048576))")
