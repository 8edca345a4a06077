"""`/v1/hosts`: the operator's servers."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request

from controlplane.api.frame import Call, Noun, Page, PageOf, Ref
from controlplane.models.artifact import StoredArtifact
from controlplane.models.bootstrap_key import BootstrapKey
from controlplane.models.host import Host
from controlplane.models.host_preflight import HostPreflight
from controlplane.resources.host import artifacts, service
from controlplane.resources.host.errors import (
    ArtifactMismatch,
    ArtifactTooLarge,
    ArtifactUnknown,
    ArtifactWrongArchitecture,
    HostAddressTaken,
    HostIsRemoving,
    HostNameReserved,
    HostNameTaken,
    HostNotEmpty,
    HostNotFound,
    HostNotReady,
    IdentityInvalid,
)
from controlplane.resources.host.schemas import (
    ArtifactListing,
    ArtifactView,
    BootstrapKeyView,
    HostCreate,
    HostUpdate,
    HostView,
    InventoryView,
    PreflightCreate,
    PreflightView,
)
from controlplane.resources.operation import service as operations
from provisioning.artifacts import Artifact

noun = Noun("host", "hosts", in_project=False)
router = noun.router

PreflightId = Annotated[str, Path(description="The id of the preflight.", examples=["pre_01jd2x4k3fe8v9m2q7t5w0y6za"])]
ArtifactName = Annotated[str, Path(description="Its name.", examples=["cloud-hypervisor"], max_length=64)]
Digest = Annotated[
    str, Query(description="SHA-256 of the bytes, as you know it.", examples=["0" * 64], pattern="^[0-9a-f]{64}$")
]
Forget = Annotated[bool, Query(description="Drop a host that is lost for good, without asking it.", examples=[False])]


@noun.route("GET", "/bootstrap-key", "bootstrap-key", BootstrapKeyView)
async def bootstrap_key(call: Call) -> BootstrapKey:
    """Show the public half of the key that first logins use."""
    return await service.bootstrap_key(call.session, call.services.sealer)


@noun.route("POST", "/preflight", "preflight", PreflightView, status=202, errors=[IdentityInvalid])
async def preflight(call: Call, body: PreflightCreate) -> HostPreflight:
    """Look at a host without changing it: its key's fingerprint, whether it is fit, and what adding it would change."""
    row = await service.preflight(call.session, call.services.sealer, body)
    await operations.record(call.session, "host_preflight", row.id, row.generation, "host.preflight", call.actor)
    call.subject = row
    return row


@noun.route("GET", "/preflights/{preflight}", "preflight-show", PreflightView)
async def show_preflight(call: Call, preflight: PreflightId) -> HostPreflight:
    """Show what a preflight has found."""
    return await call.load(HostPreflight, preflight)


@noun.route("GET", "/artifacts", "artifact-list", ArtifactListing)
async def list_artifacts(call: Call) -> ArtifactListing:
    """List what the control plane ships to hosts, and what of it is still missing."""
    held = await artifacts.stored(call.session)
    return ArtifactListing(items=[_artifact(item, held.get(item.name)) for item in artifacts.shipped()])


@noun.route(
    "PUT",
    "/artifacts/{artifact}",
    "artifact-upload",
    ArtifactView,
    errors=[ArtifactUnknown, ArtifactMismatch, ArtifactWrongArchitecture, ArtifactTooLarge],
    accepts="application/octet-stream",
)
async def upload_artifact(artifact: ArtifactName, sha256: Digest, request: Request, *, call: Call) -> ArtifactView:
    """Store one artifact: its raw bytes, with the digest that you confirm. Hosts get it when they are added or repaired."""
    wanted = artifacts.named(artifact)
    await call.release()
    store = artifacts.ArtifactStore(call.services.settings.state_dir)
    size = await store.take(wanted, request.stream(), sha256=sha256)
    return _artifact(wanted, await artifacts.record(call.session, wanted, sha256=sha256, size_bytes=size))


def _artifact(artifact: Artifact, held: StoredArtifact | None) -> ArtifactView:
    names = ("name", "version", "architecture", "file", "licence", "driver")
    known = {name: getattr(artifact, name) for name in names}
    digest, size = (held.sha256, held.size_bytes) if held else (None, None)
    return ArtifactView(**known, expected_sha256=artifact.sha256, sha256=digest, size_bytes=size)


@noun.create(HostView, errors=[HostNameTaken, HostAddressTaken, HostIsRemoving, HostNameReserved, IdentityInvalid])
async def create(call: Call, body: HostCreate) -> Host:
    """Add a host; with the name and address of one that is there, repair it."""
    return await service.add(call.session, call.services.sealer, body)


@noun.list(HostView)
async def list_(call: Call, page: Page) -> PageOf[Host]:
    """List the hosts."""
    return await call.page(Host, page, fields=["state", "location", "link", "address", "is_cordoned"])


@noun.show(HostView, errors=[HostNotFound])
async def show(call: Call, host: Ref) -> Host:
    """Show one host."""
    return await call.load(Host, host)


@noun.route("GET", "/{host}/inventory", "inventory", InventoryView, errors=[HostNotFound])
async def inventory(call: Call, host: Ref) -> Host:
    """Show everything the agent has found on the host."""
    return await call.load(Host, host)


@noun.update(HostView, errors=[HostNotFound, HostIsRemoving])
async def update(call: Call, host: Ref, body: HostUpdate) -> Host:
    """Change the fields that are sent; `bgp` replaces all routers at once."""
    return await service.update(call.session, call.services.sealer, await call.load(Host, host), body)


@noun.action("drain", HostView, errors=[HostNotFound, HostIsRemoving])
async def drain(call: Call, host: Ref) -> Host:
    """Keep new machines away from the host."""
    return await service.drain(call.session, await call.load(Host, host), is_cordoned=True)


@noun.action("undrain", HostView, errors=[HostNotFound, HostIsRemoving])
async def undrain(call: Call, host: Ref) -> Host:
    """Let new machines come to the host again."""
    return await service.drain(call.session, await call.load(Host, host), is_cordoned=False)


@noun.action("reboot", HostView, errors=[HostNotFound, HostNotReady])
async def reboot(call: Call, host: Ref) -> Host:
    """Reboot the host; its machines come back with it."""
    return await service.reboot(call.session, await call.load(Host, host))


@noun.delete(HostView, errors=[HostNotEmpty])
async def delete(call: Call, host: Ref, forget: Forget = False) -> Host:
    """Take the agent off the host, leaving it as it was, and forget it."""
    return await service.remove(call.session, call.services.clock, await call.load(Host, host), is_forgotten=forget)
