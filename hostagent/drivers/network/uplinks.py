"""Between which links of this host long flows may pass by the flowtable, found by trying.

The one rule: only where the operator declared a trusted data network, and never a machine's link or a tunnel's: what a machine
sends is looked at in every packet, and a tunnel encrypts. Correctness never depends on the answer.
Source: Linux, net/netfilter/nf_flow_table_core.c, nft_flow_offload.c.
"""

from __future__ import annotations

import json
import socket

from hostagent.drivers.network.nft import NFT
from hostagent.lib.hostconfig import HostConfig
from hostagent.lib.program import run
from hostagent.protocol.errors import AgentError

OURS = ("bp", "bq", "bw", "lo")


async def find_uplinks(config: HostConfig) -> tuple[str, ...]:
    """Of the public and the data network; () where there is no trusted one, or the kernel or a link refuses a flowtable."""
    if not config.data_interface:
        return ()
    try:
        names = {config.data_interface, config.public_interface or await _towards_the_world()}
        present = {name for _, name in socket.if_nameindex() if not name.startswith(OURS)}
        found = tuple(sorted(names & present))
        if config.data_interface in found and await is_offloadable(found):
            return found
    except AgentError:
        pass  # no such program: then nothing is offloaded
    return ()


async def is_offloadable(names: tuple[str, ...]) -> bool:
    """Asks the kernel to do it, and to forget it again."""
    devices = ", ".join(f'"{name}"' for name in names)
    rules = (
        f"table inet bp_probe {{ flowtable f {{ hook ingress priority 0; devices = {{ {devices} }}; counter; }}; "
        "chain c { type filter hook forward priority 0; ct bytes > 1 flow add @f; }; }\n"
    )
    return (await run(NFT, "-c", "-f", "-", stdin=rules.encode(), check=False)).returncode == 0


async def _towards_the_world() -> str:
    """The default route's link; "" where there is none."""
    finished = await run("ip", "-j", "route", "show", "default", check=False)
    routes = json.loads(finished.stdout or b"[]")
    return str(routes[0].get("dev", "")) if routes else ""
