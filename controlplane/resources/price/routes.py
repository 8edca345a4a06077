"""`/v1/prices`: the price book, the operator's to change and everybody's to see."""

from __future__ import annotations

from controlplane.api.frame import Call, Noun, Page, PageOf, Ref
from controlplane.models.price import Price
from controlplane.resources.price import service
from controlplane.resources.price.errors import PriceNameTaken, PriceNotFound, PriceTimeTaken
from controlplane.resources.price.schemas import PriceCreate, PriceView

noun = Noun("price", "prices", in_project=False, has_operations=False)
router = noun.router


@noun.create(PriceView, errors=[PriceNameTaken, PriceTimeTaken])
async def create(call: Call, body: PriceCreate) -> Price:
    """Give a model a price from a time on; what was served before keeps the price it had."""
    return await service.create(call.session, body, call.services.clock.now())


@noun.list(PriceView)
async def list_(call: Call, page: Page) -> PageOf[Price]:
    """List prices, those that are over and those to come among them."""
    return await call.page(Price, page, fields=["model", "valid_from"])


@noun.show(PriceView, errors=[PriceNotFound])
async def show(call: Call, price: Ref) -> Price:
    """Show one price."""
    return await call.load(Price, price)


@noun.delete(PriceView)
async def delete(call: Call, price: Ref) -> None:
    """Take a price out of the book; what was counted with it stays counted."""
    await service.remove(call.session, await call.load(Price, price))
