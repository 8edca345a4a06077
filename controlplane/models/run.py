"""A run: one program at work for one subject; and which runs wait for which.

The one rule: only statements of `controlplane.kernel.sql` write these rows.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, Index, SmallInteger, func, text
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base

SHARDS = 64


class Run(Base):
    """`step` is `start` before the first claim; `wake_at` NULL means: only a signal wakes it.

    `entered_at` is since when the run is in `step`; `ready_at` when it first reached a rest step; `overdue_at` when the
    present step's deadline was counted as missed; `last_error` what the last try of the present step died of; `failures` how
    many of its tries failed, the last with `failed_code`. `history` holds the steps it has left, see `kernel.operation`.
    """

    __tablename__ = "run"

    id: Mapped[str] = mapped_column(primary_key=True)
    program: Mapped[str]
    subject: Mapped[str]
    shard: Mapped[int] = mapped_column(SmallInteger)
    step: Mapped[str] = mapped_column(server_default="start")
    memo: Mapped[dict[str, Json]] = mapped_column(server_default=text("'{}'::jsonb"))
    wake_at: Mapped[datetime | None] = mapped_column(server_default=func.now())
    not_before: Mapped[datetime] = mapped_column(server_default=func.now())
    lease: Mapped[int | None]
    lease_until: Mapped[datetime | None]
    attempt: Mapped[int] = mapped_column(server_default="0")
    last_error: Mapped[str | None]
    failures: Mapped[int] = mapped_column(server_default="0")
    failed_code: Mapped[str | None]
    history: Mapped[list[Json]] = mapped_column(server_default=text("'[]'::jsonb"))
    entered_at: Mapped[datetime] = mapped_column(server_default=func.now())
    deadline_at: Mapped[datetime | None]
    overdue_at: Mapped[datetime | None]
    destroy_at: Mapped[datetime | None]
    ready_at: Mapped[datetime | None]
    parked_at: Mapped[datetime | None]
    parked_code: Mapped[str | None]
    parked_detail: Mapped[str | None]
    finished_at: Mapped[datetime | None]
    result: Mapped[dict[str, Json] | None]
    traceparent: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())

    __table_args__ = (
        CheckConstraint(f"shard >= 0 AND shard < {SHARDS}", name="shard_exists"),
        CheckConstraint("step <> '' AND program <> '' AND subject <> ''", name="names_are_given"),
        CheckConstraint("attempt >= 0 AND failures >= 0", name="attempt_counts"),
        CheckConstraint("failed_code IS NULL OR failures > 0", name="failed_code_of_a_failure"),
        CheckConstraint("jsonb_array_length(history) <= 32", name="history_is_bounded"),
        CheckConstraint("(lease IS NULL) = (lease_until IS NULL)", name="lease_has_an_end"),
        CheckConstraint("(parked_at IS NULL) = (parked_code IS NULL)", name="parked_says_why"),
        CheckConstraint("parked_detail IS NULL OR parked_at IS NOT NULL", name="detail_only_parked"),
        CheckConstraint("parked_at IS NULL OR (lease IS NULL AND wake_at IS NULL)", name="parked_is_at_rest"),
        CheckConstraint("lease IS NULL OR wake_at IS NOT NULL", name="leased_has_its_retry"),
        CheckConstraint(
            "finished_at IS NULL OR (lease IS NULL AND wake_at IS NULL AND parked_at IS NULL)", name="finished_is_at_rest"
        ),
        CheckConstraint("result IS NULL OR finished_at IS NOT NULL", name="result_only_finished"),
        CheckConstraint("overdue_at IS NULL OR deadline_at IS NOT NULL", name="overdue_had_a_deadline"),
        CheckConstraint("destroy_at IS NULL OR step = 'destroy'", name="destroy_is_its_step"),
        Index("run_unfinished_key", "program", "subject", unique=True, postgresql_where=text("finished_at IS NULL")),
        Index("run_due_idx", "shard", "wake_at", postgresql_where=text("finished_at IS NULL AND parked_at IS NULL")),
        Index("run_finished_idx", "finished_at", postgresql_where=text("finished_at IS NOT NULL")),
        {"postgresql_with": {"fillfactor": "60", "autovacuum_vacuum_scale_factor": "0.05"}},
    )


class RunChild(Base):
    """`parent` waits for `child` (run ids): spawning is an insert here, so it never locks the child's row."""

    __tablename__ = "run_child"

    parent: Mapped[str] = mapped_column(primary_key=True)
    child: Mapped[str] = mapped_column(primary_key=True, index=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
