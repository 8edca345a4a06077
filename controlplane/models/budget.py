"""What of a key's budget is used, and what of it gateways have in hand. The one rule: used + in hand never exceeds the budget.

No foreign keys: an account outlives the key that it counts.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, func
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.models.base import Base


class BudgetUse(Base):
    """Raised by metering, in the transaction of the records themselves. `told`: 1 the soft limit, 2 the hard one."""

    __tablename__ = "budget_use"
    __table_args__ = (
        CheckConstraint("period IN ('total', 'day', 'month')", name="period_known"),
        CheckConstraint("tokens >= 0 AND money_micros >= 0", name="not_negative"),
        CheckConstraint("told IN (0, 1, 2)", name="told_known"),
    )

    key_id: Mapped[str] = mapped_column(primary_key=True)
    period: Mapped[str] = mapped_column(primary_key=True)
    period_start: Mapped[datetime] = mapped_column(primary_key=True)
    tokens: Mapped[int] = mapped_column(server_default="0")
    money_micros: Mapped[int] = mapped_column(server_default="0")
    told: Mapped[int] = mapped_column(server_default="0")


class BudgetHold(Base):
    """Taken by a gateway, not yet settled. `since_segment`: the first segment of the journal of the process that took it."""

    __tablename__ = "budget_hold"
    __table_args__ = (CheckConstraint("tokens >= 0 AND money_micros >= 0", name="not_negative"),)

    gateway: Mapped[str] = mapped_column(primary_key=True)
    since_segment: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    key_id: Mapped[str] = mapped_column(primary_key=True)
    period: Mapped[str] = mapped_column(primary_key=True)
    period_start: Mapped[datetime] = mapped_column(primary_key=True)
    tokens: Mapped[int] = mapped_column(server_default="0")
    money_micros: Mapped[int] = mapped_column(server_default="0")
    at: Mapped[datetime] = mapped_column(server_default=func.now())
