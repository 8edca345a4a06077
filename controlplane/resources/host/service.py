"""Changes of hosts. The one rule: nothing here reaches a host; rows are written and the host's program is told."""

from __future__ import annotations

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane import kernel
from controlplane.core.clock import Clock
from controlplane.core.errors import FieldError
from controlplane.core.ids import Kind, new_id
from controlplane.core.json import Json
from controlplane.core.sealing import Sealer
from controlplane.models.bootstrap_key import BootstrapKey
from controlplane.models.host import Host
from controlplane.models.host_preflight import HostPreflight
from controlplane.placement.wake import wake_waiting
from controlplane.resources.host import bgp, keys, queries
from controlplane.resources.host.errors import HostIsRemoving, HostNameReserved, HostNameTaken, HostNotEmpty, HostNotReady
from controlplane.resources.host.schemas import HostCreate, HostUpdate, PreflightCreate, Share

PROGRAM = "host"
PREFLIGHT_PROGRAM = "host_preflight"
RESERVED_NAMES = frozenset({"artifacts", "bootstrap-key", "preflight", "preflights"})


async def bootstrap_key(session: AsyncSession, sealer: Sealer) -> BootstrapKey:
    """The deployment's key for first logins, made when it is first asked for."""
    found = await queries.bootstrap_key(session)
    if found is None:
        public, private = keys.new_key("bedplate-bootstrap")
        sealed = sealer.seal(private, context=keys.BOOTSTRAP_CONTEXT)
        values = {"public_key": public, "private_key_sealed": sealed}
        await session.execute(insert(BootstrapKey).values(**values).on_conflict_do_nothing())
        found = await queries.bootstrap_key(session)
    assert found is not None
    return found


async def preflight(session: AsyncSession, sealer: Sealer, body: PreflightCreate) -> HostPreflight:
    """Have a worker look at a host."""
    await bootstrap_key(session, sealer)
    await _forget_failed_looks(session, body.address, body.port)
    row = HostPreflight(
        id=new_id(Kind.PREFLIGHT),
        address=body.address,
        port=body.port,
        login_user=body.user,
        needs_sudo=body.sudo,
        jump=body.jump,
        config=_config(body),
        expected_fingerprint=body.host_key_fingerprint or "",
    )
    if body.identity is not None:
        row.identity_sealed = keys.sealed_identity(sealer, body.identity.get_secret_value(), row.id)
    session.add(row)
    await session.flush()
    await kernel.start(session, PREFLIGHT_PROGRAM, row.id)
    return row


async def _forget_failed_looks(session: AsyncSession, address: str, port: int) -> None:
    """End the failed preflights of a place that is tried anew, and with them their incidents."""
    for old_id in await queries.failed_preflights(session, address, port):
        await kernel.destroy(session, PREFLIGHT_PROGRAM, old_id)


async def add(session: AsyncSession, sealer: Sealer, body: HostCreate) -> Host:
    """Add a host, or repair the one with this name and address.

    Raises HostNameTaken, HostAddressTaken, HostIsRemoving, HostNameReserved, IdentityInvalid.
    """
    if body.name in RESERVED_NAMES:
        detail = f"a host cannot be named {body.name}"
        raise HostNameReserved(detail, errors=(FieldError(pointer="/name", detail=detail),))
    await bootstrap_key(session, sealer)
    host = await queries.by_name_locked(session, body.name)
    if host is None:
        host = _made(sealer, body.name)
        session.add(host)
    elif host.state == "removing":
        raise HostIsRemoving(f"host {host.name} is being removed")
    elif (host.address, host.port) != (body.address, body.port):
        raise HostNameTaken(f"host {host.name} is at {host.address} port {host.port}")
    else:
        host.generation += 1
    _apply(sealer, host, body)
    await session.flush()
    await _forget_failed_looks(session, body.address, body.port)
    await kernel.start(session, PROGRAM, host.id)
    await kernel.resume(session, PROGRAM, host.id)
    return host


def _made(sealer: Sealer, name: str) -> Host:
    """With the key that its agent will know the control plane by: made before anything of the host is touched."""
    host_id = new_id(Kind.HOST)
    public, private = keys.new_key(host_id)
    sealed = sealer.seal(private, context=keys.host_context(host_id))
    return Host(id=host_id, name=name, ssh_key_sealed=sealed, ssh_public_key=public)


def _apply(sealer: Sealer, host: Host, body: HostCreate) -> None:
    host.state = "enrolling"
    host.address, host.port = body.address, body.port
    host.login_user, host.needs_sudo, host.jump = body.user, body.sudo, body.jump
    host.host_key_fingerprint = body.host_key_fingerprint
    host.roles, host.labels, host.location = [*dict.fromkeys(body.roles)], {**body.labels}, body.location
    host.data_interface, host.config = body.data_interface, _config(body)
    if body.identity is not None:
        host.identity_sealed = keys.sealed_identity(sealer, body.identity.get_secret_value(), host.id)


def _config(body: Share) -> dict[str, Json]:
    """What was given of the share; the program knows what of it belongs on the host."""
    given: dict[str, Json | None] = {
        "cpus": body.cpus,
        "memory_bytes": body.memory_bytes,
        "data_interface": body.data_interface or None,
        "qemu_on_kvm": body.qemu_on_kvm or None,
    }
    return {name: value for name, value in given.items() if value is not None}


async def update(session: AsyncSession, sealer: Sealer, host: Host, changes: HostUpdate) -> Host:
    """Raises HostIsRemoving. Its routers are told anew where they changed, passwords included."""
    if host.state == "removing":
        raise HostIsRemoving(f"host {host.name} is being removed")
    sent = changes.model_fields_set
    if "labels" in sent:
        host.labels = {**changes.labels}
    if "location" in sent:
        host.location = changes.location
    if "bgp" in sent:
        revision = (host.bgp or {}).get("revision")
        host.bgp, host.bgp_passwords_sealed = None, None
        if changes.bgp is not None:
            host.bgp, host.bgp_passwords_sealed = bgp.kept(sealer, host.id, changes.bgp, revision=revision)
        await kernel.start(session, "policy", "all")
    await kernel.signal(session, PROGRAM, host.id, "changed")
    return host


async def drain(session: AsyncSession, host: Host, *, is_cordoned: bool) -> Host:
    """Keep new machines away, or let them come again; those that are there stay."""
    if host.state == "removing":
        raise HostIsRemoving(f"host {host.name} is being removed")
    await kernel.signal(session, PROGRAM, host.id, "changed")
    if not is_cordoned:
        await wake_waiting(session)
    host.is_cordoned = is_cordoned
    return host


async def reboot(session: AsyncSession, host: Host) -> Host:
    """Raises HostNotReady."""
    if host.state != "ready":
        raise HostNotReady(f"host {host.name} is {host.state}")
    host.reboot_generation += 1
    await kernel.signal(session, PROGRAM, host.id, "changed")
    return host


async def remove(session: AsyncSession, clock: Clock, host: Host, *, is_forgotten: bool) -> Host:
    """Take the agent off the host and forget it; with `is_forgotten` without asking the host.

    Raises HostNotEmpty while something is reserved on it, unless it is forgotten.
    """
    if not is_forgotten and (host.reserved_vcpus or host.reserved_memory_bytes):
        raise HostNotEmpty(f"machines on {host.name} hold {host.reserved_vcpus} vCPUs", vcpus=host.reserved_vcpus)
    if not is_forgotten and (names := await queries.disks_on(session, host.id)):
        raise HostNotEmpty(f"volumes or snapshots lie on {host.name}: {', '.join(names)}", disks=[*names])
    if host.state != "removing":
        host.state, host.removing_at = "removing", clock.now()
    host.is_cordoned = True
    host.is_forgotten = host.is_forgotten or is_forgotten
    await kernel.start(session, PROGRAM, host.id)
    await kernel.destroy(session, PROGRAM, host.id)
    return host
