"""Routers of a host, in its row and as it is told of them. The one rule: passwords are sealed, and opened to be said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from controlplane.core import json
from controlplane.core.json import Json
from controlplane.core.sealing import Sealer
from controlplane.models.host import Host
from controlplane.resources.host.schemas import Bgp
from hostagent.protocol import codec
from hostagent.protocol.network import BgpWanted, PolicyWanted


def context(host_id: str) -> str:
    return f"host.bgp:{host_id}"


def kept(sealer: Sealer, host_id: str, wanted: Bgp, *, revision: Json) -> tuple[dict[str, Json], bytes | None]:
    """The row's two columns. A new revision makes a new document, also when only a password is another one."""
    peers: list[Json] = [
        {"address": peer.address, "peer_as": peer.peer_as, "has_password": peer.password is not None} for peer in wanted.peers
    ]
    number = revision + 1 if isinstance(revision, int) else 1
    found: dict[str, Json] = {"local_as": wanted.local_as, "port": wanted.port, "peers": peers, "revision": number}
    passwords: dict[str, Json] = {
        peer.address: peer.password.get_secret_value() for peer in wanted.peers if peer.password is not None
    }
    return found, sealer.seal(json.dumps(passwords), context=context(host_id)) if passwords else None


def planned(host: Host) -> BgpWanted | None:
    """Without passwords."""
    if host.bgp is None:
        return None
    kept: Any = host.bgp
    peers = [{"address": peer["address"], "peer_as": peer["peer_as"]} for peer in kept["peers"]]
    return codec.decode(BgpWanted, {**kept, "peers": peers})


def with_passwords(document: PolicyWanted, host: Host, sealer: Sealer) -> PolicyWanted:
    if document.bgp is None or host.bgp_passwords_sealed is None:
        return document
    passwords: Any = json.loads(sealer.open(host.bgp_passwords_sealed, context=context(host.id)))
    peers = tuple(replace(peer, password=passwords.get(peer.address, "")) for peer in document.bgp.peers)
    return replace(document, bgp=replace(document.bgp, peers=peers))
