"""`/v1/providers`: external providers of models, the operator's."""

from __future__ import annotations

from controlplane.api.frame import Call, Noun, Page, PageOf, Ref
from controlplane.models.provider import Provider
from controlplane.resources.provider import service
from controlplane.resources.provider.errors import ProviderInUse, ProviderNameTaken, ProviderNotFound, ProviderProjectUnknown
from controlplane.resources.provider.schemas import ProviderCreate, ProviderUpdate, ProviderView

noun = Noun("provider", "providers", in_project=False, has_operations=False)
router = noun.router


@noun.create(ProviderView, errors=[ProviderNameTaken, ProviderProjectUnknown])
async def create(call: Call, body: ProviderCreate) -> Provider:
    """Let projects call models of a provider outside; its key is kept sealed."""
    return await service.create(call.session, call.services.sealer, body)


@noun.list(ProviderView)
async def list_(call: Call, page: Page) -> PageOf[Provider]:
    """List providers; never their keys."""
    return await call.page(Provider, page, fields=["kind"])


@noun.show(ProviderView, errors=[ProviderNotFound])
async def show(call: Call, provider: Ref) -> Provider:
    """Show one provider; never its key."""
    return await call.load(Provider, provider)


@noun.update(ProviderView, errors=[ProviderNotFound, ProviderProjectUnknown])
async def update(call: Call, provider: Ref, body: ProviderUpdate) -> Provider:
    """Change a provider or its key; in force within a second."""
    row = await call.load(Provider, provider)
    await service.change(call.session, call.services.sealer, row, body)
    return row


@noun.delete(ProviderView, errors=[ProviderInUse])
async def delete(call: Call, provider: Ref) -> None:
    """Take a provider away; routes must not lead to it."""
    await service.remove(call.session, await call.load(Provider, provider))
