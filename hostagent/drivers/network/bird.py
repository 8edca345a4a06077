"""Telling routers of addresses by BGP: BIRD 2 as a program of its own, beside any other.

The one rule: it has its own configuration and socket and no kernel protocol, so it changes no route of this host and knows
nothing of a BIRD that runs here already. Source: BIRD 2.0 user's guide, chapters 5 and 6.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path

from hostagent.drivers.network.reach import (
    SpeakerTraits,
)
from hostagent.drivers.supervisor.protocol import SupervisorDriver, UnitWanted
from hostagent.lib import files
from hostagent.lib.hostconfig import HostConfig
from hostagent.lib.paths import Paths
from hostagent.lib.program import run
from hostagent.protocol.errors import AgentError
from hostagent.protocol.network import BgpPeerWanted, BgpWanted

BIRD = "/usr/sbin/bird"
BIRDC = "/usr/sbin/birdc"
UNIT = "bgp"


NOBODY = BgpWanted(local_as=0, peers=())


def declared(config: HostConfig) -> BgpWanted:
    """As `host.toml` says; a peer there is `192.0.2.1 65001`, a router's address and its AS number."""
    split = (peer.split(" ") for peer in config.bgp_peers)
    peers = tuple(BgpPeerWanted(address=address, peer_as=int(number)) for address, number in split)
    return BgpWanted(local_as=config.bgp_local_as or 0, peers=peers, port=config.bgp_port)


class Bird:
    traits = SpeakerTraits(name="bird")

    def __init__(self, supervisor: SupervisorDriver, paths: Paths, declared: BgpWanted = NOBODY) -> None:
        self._supervisor = supervisor
        self._declared = declared
        self._file = paths.run / "bgp" / "bird.conf"  # it may hold passwords: gone with the boot, written again from documents
        self._socket = paths.run / "bird.sock"
        self._log = paths.log / "bgp.log"

    async def is_up(self, addresses: Sequence[str], routers: BgpWanted | None = None) -> bool:
        unit = await self._supervisor.observe(UNIT)
        if not addresses:
            return unit is None
        text = render(routers or self._declared, addresses)
        is_told = self._file.exists() and self._file.read_text(encoding="ascii") == text
        return is_told and unit is not None and unit.state == "running"

    async def apply(self, addresses: Sequence[str], routers: BgpWanted | None = None) -> None:
        """Raises AgentError `address.no_bgp_peers`, `program.missing`."""
        if not addresses:
            if await self._supervisor.observe(UNIT) is not None:
                await self._supervisor.remove(UNIT)
            self._file.unlink(missing_ok=True)
            return
        wanted = routers or self._declared
        if not wanted.peers or not wanted.local_as:
            words = "the host has no BGP peers: name them by `bedplate host update --bgp-peer`"
            raise AgentError("address.no_bgp_peers", words, retryable=False)
        if not Path(BIRD).exists():
            raise AgentError("program.missing", f"{BIRD} is not installed", retryable=False, program=BIRD)
        text = render(wanted, addresses)
        is_new = not self._file.exists() or self._file.read_text(encoding="ascii") != text
        if is_new:
            files.write_atomically(self._file, text.encode(), mode=0o600)
        unit = await self._supervisor.observe(UNIT)
        if unit is not None and unit.state == "running":
            if is_new:
                await run(BIRDC, "-s", str(self._socket), "configure")
            return
        argv = (BIRD, "-f", "-c", str(self._file), "-s", str(self._socket))
        await self._supervisor.apply(UnitWanted(name=UNIT, argv=argv, log_path=self._log, stop_grace_seconds=3.0))


def render(config: BgpWanted, addresses: Sequence[str]) -> str:
    """Each address as a route of its own; nothing is learned from anybody."""
    lines = ["log stderr all;", "protocol device { }"]
    for version, channel in ((4, "ipv4"), (6, "ipv6")):
        found = [address for address in addresses if ipaddress.ip_address(address).version == version]
        routes = "".join(f" route {address}/{32 if version == 4 else 128} blackhole;" for address in found)
        lines.append(f"protocol static held{version} {{ {channel};{routes} }}")
    for index, peer in enumerate(config.peers):
        channel = "ipv6" if ":" in peer.address else "ipv4"
        password = [f'  password "{peer.password}";'] if peer.password else []
        lines += [
            f"protocol bgp router{index} {{",
            f"  local port {config.port} as {config.local_as};",
            f"  neighbor {peer.address} as {peer.peer_as};",
            *password,
            "  connect retry time 5; connect delay time 1; hold time 9;",
            f"  {channel} {{ import none; export where source = RTS_STATIC; next hop self; }};",
            "}",
        ]
    return "".join(f"{line}\n" for line in lines)
