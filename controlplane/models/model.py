"""Models that were imported from the catalogue: what they are, and the images that hold engine and weights.

The one rule: `spec` is the catalogue's entry as it was at the import, with its engine; `digest` names it.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from controlplane.core.json import Json
from controlplane.models.base import Base, Versioned


class Model(Versioned, Base):
    """States: `importing`, `available`. `fetched_bytes`: how much of the weights that have a URL has come."""

    __tablename__ = "model"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    spec: Mapped[dict[str, Json]]
    digest: Mapped[str]
    state: Mapped[str] = mapped_column(default="importing", server_default="importing")
    weights_image_id: Mapped[str | None] = mapped_column(ForeignKey("image.id"))
    engine_image_id: Mapped[str | None] = mapped_column(ForeignKey("image.id"))
    fetched_bytes: Mapped[int] = mapped_column(server_default="0")

    __table_args__ = (
        CheckConstraint("state IN ('importing', 'available')", name="state_known"),
        CheckConstraint(
            "(state = 'available') <= (weights_image_id IS NOT NULL AND engine_image_id IS NOT NULL)", name="available_is_whole"
        ),
        CheckConstraint("digest ~ '^[0-9a-f]{64}$'", name="digest_form"),
        CheckConstraint("observed_generation <= generation", name="observed_not_ahead"),
    )
