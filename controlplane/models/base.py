"""The declarative base. The one rule: a state column has a named CHECK that ties it to its companions."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, DateTime, MetaData, Text, func
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from controlplane.core.json import Json


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "pk": "%(table_name)s_pkey",
            "fk": "%(table_name)s_%(column_0_name)s_fkey",
            "ix": "%(table_name)s_%(column_0_N_name)s_idx",
            "uq": "%(table_name)s_%(column_0_N_name)s_key",
            "ck": "%(table_name)s_%(constraint_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy's own declaration
        int: BigInteger,
        str: Text,
        datetime: DateTime(timezone=True),
        dict[str, Json]: JSONB,
        list[Json]: JSONB,
    }

    # Values the database makes come back with the statement: an async session cannot load them later.
    __mapper_args__: dict[str, Any] = {"eager_defaults": True}  # noqa: RUF012 - SQLAlchemy's own declaration


class Stamped:
    """Creation and change times, set by the database."""

    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now(), onupdate=func.now())


class Versioned(Stamped):
    """`generation` counts changes of what is wanted; it is the ETag and what `observed_generation` must reach."""

    generation: Mapped[int] = mapped_column(default=1, server_default="1")
    observed_generation: Mapped[int] = mapped_column(default=0, server_default="0")
