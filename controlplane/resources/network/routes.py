"""Networks over HTTP."""

from __future__ import annotations

from controlplane.api.frame import Call, Noun, Page, PageOf, Ref
from controlplane.models.network import Network
from controlplane.resources.network import service
from controlplane.resources.network.errors import (
    NetworkCidrOutsidePool,
    NetworkCidrTaken,
    NetworkDataUntrusted,
    NetworkEncryptionUnsupported,
    NetworkFirewallUnknown,
    NetworkInUse,
    NetworkNameTaken,
    NetworkNotFound,
    NetworkPoolExhausted,
)
from controlplane.resources.network.schemas import NetworkCreate, NetworkUpdate, NetworkView

noun = Noun("network", "networks", has_operations=False)
router = noun.router


@noun.create(
    NetworkView,
    errors=[
        NetworkNameTaken,
        NetworkCidrTaken,
        NetworkCidrOutsidePool,
        NetworkDataUntrusted,
        NetworkEncryptionUnsupported,
        NetworkFirewallUnknown,
        NetworkPoolExhausted,
    ],
)
async def create(body: NetworkCreate, *, call: Call) -> Network:
    """Make a private network. It can be used at once."""
    return await service.create(call.session, call.services.settings.network, call.project_id, body)


@noun.list(NetworkView)
async def list_networks(page: Page, *, call: Call) -> PageOf[Network]:
    """The networks of the project."""
    return await call.page(Network, page, fields=["encryption"])


@noun.show(NetworkView, errors=[NetworkNotFound])
async def show(network: Ref, *, call: Call) -> Network:
    """One network."""
    return await call.load(Network, network)


@noun.update(NetworkView, errors=[NetworkNotFound])
async def update(network: Ref, body: NetworkUpdate, *, call: Call) -> Network:
    """Change the fields that are sent."""
    row = await call.load(Network, network)
    for name, value in body.model_dump(exclude_unset=True).items():
        setattr(row, name, value)
    return row


@noun.delete(NetworkView, errors=[NetworkInUse])
async def delete(network: Ref, *, call: Call) -> None:
    """Delete a network that no machine uses; its prefix is free again."""
    await service.remove(call.session, await call.load(Network, network))
