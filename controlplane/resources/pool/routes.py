"""Pools over HTTP: the operator's to change, everybody's to see."""

from __future__ import annotations

from controlplane.api.frame import Call, Noun, Page, PageOf, Ref
from controlplane.models.address import Pool
from controlplane.resources.pool import service
from controlplane.resources.pool.errors import PoolCidrTaken, PoolExclusionOutside, PoolInUse, PoolNameTaken, PoolNotFound
from controlplane.resources.pool.schemas import PoolCreate, PoolUpdate, PoolView

noun = Noun("pool", "pools", in_project=False, has_operations=False)
router = noun.router


@noun.create(PoolView, errors=[PoolNameTaken, PoolCidrTaken])
async def create(call: Call, body: PoolCreate) -> Pool:
    """Make a pool of public addresses."""
    return await service.create(call.session, body)


@noun.list(PoolView)
async def list_(call: Call, page: Page) -> PageOf[Pool]:
    """The pools of the deployment."""
    return await call.page(Pool, page, fields=["announce"])


@noun.show(PoolView, errors=[PoolNotFound])
async def show(call: Call, pool: Ref) -> Pool:
    """One pool."""
    return await call.load(Pool, pool)


@noun.update(PoolView, errors=[PoolNotFound, PoolExclusionOutside])
async def update(call: Call, pool: Ref, body: PoolUpdate) -> Pool:
    """Change the fields that are sent."""
    row = await call.load(Pool, pool)
    service.update(row, body)
    return row


@noun.delete(PoolView, errors=[PoolInUse])
async def delete(call: Call, pool: Ref) -> None:
    """Delete a pool of which nothing is reserved."""
    await service.remove(call.session, await call.load(Pool, pool))
