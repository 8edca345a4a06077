"""volumes of machines: a root disk's machine is named by `vm_id`, `owner_id` is a replica's"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "20261201_0100"
down_revision = "20261130_2100"


def upgrade() -> None:
    op.add_column("volume", sa.Column("vm_id", sa.Text(), nullable=True))
    op.add_column("volume", sa.Column("attached_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("volume", sa.Column("delete_with_vm", sa.Boolean(), server_default="false", nullable=False))
    op.create_foreign_key(op.f("volume_vm_id_fkey"), "volume", "vm", ["vm_id"], ["id"])
    op.execute("ALTER TABLE volume DROP CONSTRAINT volume_boot_has_owner")
    op.drop_index("volume_boot_key", table_name="volume")
    op.execute(
        """UPDATE volume SET vm_id = vm.id, owner_id = vm.owner_id, attached_at = volume.created_at, delete_with_vm = true
        FROM vm WHERE vm.id = volume.owner_id"""
    )
    op.create_index("volume_boot_key", "volume", ["vm_id"], unique=True, postgresql_where="is_boot")
