"""Run by alembic; `controlplane.migrate` hands over the open connection."""

from __future__ import annotations

from alembic import context

from controlplane.migrate import is_migrated
from controlplane.models.all import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    compare_type=True,
    compare_server_default=True,
    include_name=is_migrated,
    transaction_per_migration=False,
)
with context.begin_transaction():
    context.run_migrations()
