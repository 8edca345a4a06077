"""Changes of prices: they come and go, and never change."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.ids import Kind, new_id
from controlplane.core.money import micros_of
from controlplane.models.price import Price
from controlplane.resources.key.publish import publish
from controlplane.resources.price.schemas import PriceCreate


async def create(session: AsyncSession, wanted: PriceCreate, now: datetime) -> Price:
    price = Price(
        id=new_id(Kind.PRICE),
        name=wanted.name,
        model=wanted.model,
        valid_from=wanted.valid_from or now,
        prompt=micros_of(wanted.prompt),
        cached=None if wanted.cached is None else micros_of(wanted.cached),
        completion=micros_of(wanted.completion),
        request=micros_of(wanted.request),
    )
    session.add(price)
    await publish(session, "routes")
    return price


async def remove(session: AsyncSession, price: Price) -> None:
    """What was counted with it stays as it is."""
    await session.delete(price)
    await publish(session, "routes")
