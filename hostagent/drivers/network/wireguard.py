"""Tunnels to other hosts: WireGuard of the kernel where it has it, else the program `wireguard-go`, both told by `wg`.

The one rule: what is right already is not touched, so that sessions and packets in flight live through every change. An
interface's name is its slot and a part of the machine id: userspace sockets in /run/wireguard and the namespace may be shared.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hostagent.drivers.network.links import ensure_forwarding, way_sysctls
from hostagent.drivers.network.netlink import Netlink, Request, opened, set_sysctl, sysctl
from hostagent.drivers.network.reach import (
    TunnelInterfaceObserved,
    TunnelsObserved,
    TunnelTraits,
)
from hostagent.drivers.network.tunnel_keys import WG, TunnelKeys
from hostagent.drivers.supervisor.protocol import SupervisorDriver, UnitWanted
from hostagent.lib.paths import Paths
from hostagent.lib.program import run
from hostagent.lib.wait import until
from hostagent.protocol.errors import AgentError
from hostagent.protocol.network import TunnelInterfaceWanted, TunnelPeerWanted, TunnelWanted

WIREGUARD_GO = "/usr/bin/wireguard-go"
SLOTS = ("a", "b")
NAME = re.compile(r"bw[ab][0-9a-f]{8}")
FRESH_SECONDS = 240
"""A live peer's handshake is at most this old: it is renewed after 120 s, by keepalives if by nothing else."""
START_SECONDS = 10.0
LINK_LOCAL = ("fe80:", "169.254.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """As `wg show dump` tells it."""

    public_key: str
    endpoint: str
    allowed_cidrs: frozenset[str]
    handshake_at: int
    keepalive_seconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    public_key: str
    listen_port: int
    peers: dict[str, Peer]


def interface_of(machine_id: str, slot: str) -> str:
    return f"bw{slot}{hashlib.sha256(machine_id.encode()).hexdigest()[:8]}"


def unit_of(slot: str) -> str:
    return f"tunnel-{slot}"


class WireGuard:
    traits = TunnelTraits(name="wireguard")

    def __init__(self, supervisor: SupervisorDriver, paths: Paths, keys: TunnelKeys) -> None:
        self._supervisor = supervisor
        self._keys = keys
        self._log = paths.log
        self.machine_id = paths.machine_id.read_text(encoding="ascii").strip() if paths.machine_id.exists() else ""
        self.names = {slot: interface_of(self.machine_id, slot) for slot in SLOTS}

    async def observe(self, wanted: TunnelWanted | None) -> TunnelsObserved | None:
        async with opened() as netlink:
            present = {link.name: link for link in await netlink.links()}
            found: list[TunnelInterfaceObserved] = []
            differences: list[str] = []
            by_slot = {interface.slot: interface for interface in wanted.interfaces} if wanted else {}
            for slot, name in self.names.items():
                device = await self._device(name) if name in present else None
                asked = by_slot.get(slot)
                if device is None:
                    differences += [f"{name} is missing"] if asked or name in present else []
                    continue
                kind = "kernel" if present[name].kind == "wireguard" else "userspace"
                found.append(await self._observed(slot, device, wanted, kind))
                if asked is None:
                    differences.append(f"{name} is not wanted")
                elif wanted is not None:
                    differences += await self._differences(netlink, asked, wanted, device)
        if not found and not differences:
            return None
        return TunnelsObserved(interfaces=tuple(found), differences=tuple(differences))

    async def apply(self, wanted: TunnelWanted) -> TunnelsObserved:
        ensure_forwarding()
        async with opened() as netlink:
            for interface in wanted.interfaces:
                await self._make(netlink, self.names[interface.slot], interface.slot)
                await self._configure(netlink, interface, wanted)
            for slot in set(self.names) - {interface.slot for interface in wanted.interfaces}:
                await self._remove(netlink, slot)
        self._keys.keep(frozenset((interface.slot, interface.key_generation) for interface in wanted.interfaces))
        return await self.observe(wanted) or TunnelsObserved(interfaces=())

    async def remove(self) -> None:
        async with opened() as netlink:
            for slot in self.names:
                await self._remove(netlink, slot)
        self._keys.keep(frozenset())

    async def _make(self, netlink: Netlink, name: str, slot: str) -> None:
        """The interface, up to taking orders. A process without its interface, or the other way round, is made anew."""
        if await netlink.link(name) is not None and await self._device(name) is not None:
            return
        if (unit := await self._supervisor.observe(unit_of(slot))) is not None:
            await self._supervisor.remove(unit.name)
        await netlink.remove_link(name)
        if await netlink.make_wireguard(name):
            return
        if not Path(WIREGUARD_GO).exists():
            raise AgentError(
                "tunnel.unsupported", "the kernel has no WireGuard, and wireguard-go is not installed", retryable=False
            )
        await self._supervisor.apply(
            UnitWanted(
                name=unit_of(slot),
                argv=(WIREGUARD_GO, "-f", name),
                env={"LOG_LEVEL": "error", "WG_PROCESS_FOREGROUND": "1"},
                log_path=self._log / f"{unit_of(slot)}.log",
                stop_grace_seconds=2.0,
            )
        )

        async def takes_orders() -> bool:
            return await self._device(name) is not None

        if not await until(takes_orders, seconds=START_SECONDS):
            raise AgentError("tunnel.not_started", f"wireguard-go did not make {name} within {START_SECONDS:g} s")

    async def _configure(self, netlink: Netlink, interface: TunnelInterfaceWanted, wanted: TunnelWanted) -> None:
        name = self.names[interface.slot]
        device = await self._device(name)
        if device is None:
            raise AgentError("tunnel.not_started", f"{name} does not answer")
        public = await self._keys.public(interface.slot, interface.key_generation)
        if device.public_key != public:
            private = await self._keys.private(interface.slot, interface.key_generation)
            await run(WG, "set", name, "private-key", "/dev/stdin", stdin=private)
        if device.listen_port != interface.listen_port:
            await run(WG, "set", name, "listen-port", str(interface.listen_port))
        await netlink.carry_out(await self._link_requests(netlink, name, wanted))
        for key, value in way_sysctls(name):
            set_sysctl(key, value)
        asked = {peer.public_key: peer for peer in wanted.peers if peer.slot == interface.slot}
        changed = [peer for key, peer in asked.items() if not _is_same(device.peers.get(key), peer)]
        if changed:
            await run(WG, "addconf", name, "/dev/stdin", stdin=peers_text(changed).encode())
        stale = [word for key in device.peers if key not in asked for word in ("peer", key, "remove")]
        if stale:
            await run(WG, "set", name, *stale)

    async def _link_requests(self, netlink: Netlink, name: str, wanted: TunnelWanted) -> tuple[Request, ...]:
        link = await netlink.link(name)
        assert link is not None
        requests: list[Request] = []
        if not link.is_up or link.mtu_bytes != wanted.mtu_bytes:
            alias = f"bedplate tunnel {name[2]}"
            requests.append(("link_up", (("name", name), ("mtu", wanted.mtu_bytes), ("alias", alias))))
        present, asked = _global(await netlink.addresses(link.index)), _with_length(wanted.addresses)
        requests += [("address_add", (("name", name), ("address", address))) for address in sorted(asked - present)]
        requests += [("address_remove", (("name", name), ("address", address))) for address in sorted(present - asked)]
        return tuple(requests)

    async def _remove(self, netlink: Netlink, slot: str) -> None:
        await netlink.remove_link(self.names[slot])
        if await self._supervisor.observe(unit_of(slot)) is not None:
            await self._supervisor.remove(unit_of(slot))
        Path(f"/run/wireguard/{self.names[slot]}.sock").unlink(missing_ok=True)

    async def _device(self, name: str) -> Device | None:
        """None while nothing answers for it. The first word of the answer is the private key: it goes no further."""
        finished = await run(WG, "show", name, "dump", check=False)
        if finished.returncode != 0:
            return None
        first, *rest = finished.stdout.decode().splitlines()
        _, public_key, listen_port, _ = first.split("\t")
        peers = {peer.public_key: peer for peer in map(_peer, rest)}
        return Device(public_key=public_key, listen_port=int(listen_port), peers=peers)

    async def _observed(
        self, slot: str, device: Device, wanted: TunnelWanted | None, kind: Literal["kernel", "userspace"]
    ) -> TunnelInterfaceObserved:
        unit = await self._supervisor.observe(unit_of(slot)) if kind == "userspace" else None
        hosts = {peer.public_key: peer.host_id for peer in wanted.peers if peer.slot == slot} if wanted else {}
        heard = {hosts[key] for key, peer in device.peers.items() if key in hosts and _is_fresh(peer)}
        return TunnelInterfaceObserved(
            slot=slot,
            interface=self.names[slot],
            driver=kind,
            public_key=device.public_key,
            listen_port=device.listen_port,
            heard_host_ids=tuple(sorted(heard)),
            incarnation=unit.incarnation if unit else None,
        )

    async def _differences(
        self, netlink: Netlink, asked: TunnelInterfaceWanted, wanted: TunnelWanted, device: Device
    ) -> list[str]:
        name = self.names[asked.slot]
        found = [verb for verb, _ in await self._link_requests(netlink, name, wanted)]
        if device.public_key != await self._keys.public(asked.slot, asked.key_generation):
            found.append("key")
        if device.listen_port != asked.listen_port:
            found.append("port")
        peers = {peer.public_key: peer for peer in wanted.peers if peer.slot == asked.slot}
        if set(peers) != set(device.peers):
            found.append("peers")
        found += [f"peer {key[:8]}" for key, peer in peers.items() if not _is_same(device.peers.get(key), peer)]
        with contextlib.suppress(OSError):
            found += [key for key, value in way_sysctls(name) if sysctl(key) != value]
        return [f"{name}: {what}" for what in found]


def peers_text(peers: Sequence[TunnelPeerWanted]) -> str:
    """For `wg addconf`: each names all of its allowed addresses, and takes them from whoever had them."""
    lines: list[str] = []
    for peer in peers:
        lines += ["[Peer]", f"PublicKey = {peer.public_key}", f"Endpoint = {_endpoint(peer)}"]
        lines.append(f"PersistentKeepalive = {peer.keepalive_seconds or 'off'}")
        lines += [f"AllowedIPs = {', '.join(peer.allowed_cidrs)}"] if peer.allowed_cidrs else []
    return "".join(f"{line}\n" for line in lines)


def _endpoint(peer: TunnelPeerWanted) -> str:
    host = f"[{peer.endpoint_address}]" if ":" in peer.endpoint_address else peer.endpoint_address
    return f"{host}:{peer.endpoint_port}"


def _peer(line: str) -> Peer:
    public_key, _, endpoint, allowed, handshake_at, _, _, keepalive = line.split("\t")
    return Peer(
        public_key=public_key,
        endpoint=endpoint,
        allowed_cidrs=frozenset() if allowed == "(none)" else frozenset(allowed.split(",")),
        handshake_at=int(handshake_at),
        keepalive_seconds=0 if keepalive == "off" else int(keepalive),
    )


def _is_fresh(peer: Peer) -> bool:
    return time.time() - peer.handshake_at < FRESH_SECONDS


def _is_same(found: Peer | None, wanted: TunnelPeerWanted) -> bool:
    """A peer that is heard may have moved to another address: WireGuard follows it, so do we."""
    if found is None or found.allowed_cidrs != frozenset(wanted.allowed_cidrs):
        return False
    is_where_said = found.endpoint == _endpoint(wanted) or _is_fresh(found)
    return is_where_said and found.keepalive_seconds == wanted.keepalive_seconds


def _with_length(addresses: Sequence[str]) -> frozenset[str]:
    return frozenset(f"{address}/{128 if ':' in address else 32}" for address in addresses)


def _global(addresses: set[str]) -> frozenset[str]:
    return frozenset(address for address in addresses if not address.startswith(LINK_LOCAL))
