"""`/v1/tunnels`: the operator's look at the mesh, and the turn of keys."""

from __future__ import annotations

from controlplane.api.frame import Call, Noun
from controlplane.models.tunnel import HostTunnel, TunnelRotation
from controlplane.resources.tunnel import queries, service
from controlplane.resources.tunnel.errors import TunnelsRotating
from controlplane.resources.tunnel.schemas import RotationView, TunnelHostView, TunnelsView

noun = Noun("tunnel", "tunnels", in_project=False, has_operations=False)
router = noun.router


@noun.route("GET", "", "show", TunnelsView)
async def show(call: Call) -> TunnelsView:
    """The hosts in the mesh with their public keys, and the state of a rotation."""
    rotation = await queries.find_rotation(call.session)
    hosts = [_host(row, name) for row, name in await queries.named_hosts(call.session)]
    return TunnelsView(rotation=_rotation(rotation), hosts=hosts)


@noun.route("POST", "/rotate-keys", "rotate-keys", RotationView, errors=[TunnelsRotating])
async def rotate_keys(call: Call) -> RotationView:
    """Give every host a new key, without losing a packet: the old ones go when no host uses them any more."""
    return _rotation(await service.rotate(call.session, call.services.clock.now()))


def _rotation(row: TunnelRotation | None) -> RotationView:
    if row is None:
        return RotationView(key_generation=1, is_rotating=False, started_at=None, finished_at=None)
    return RotationView(
        key_generation=row.key_generation,
        is_rotating=row.is_rotating,
        started_at=row.started_at,
        finished_at=row.finished_at,
    )


def _host(row: HostTunnel, name: str) -> TunnelHostView:
    return TunnelHostView(
        host_id=row.host_id,
        host=name,
        ipv4=row.ipv4,
        ipv6=row.ipv6,
        public_keys=[key for key in (row.public_key_a, row.public_key_b) if key],
        heard=sorted({*row.heard_a, *row.heard_b}),
        is_applied=row.applied_generation == row.generation,
    )
