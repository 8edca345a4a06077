"""Flows of real packets, in a network namespace of the test's own that tracks its connections."""

from __future__ import annotations

import socket
import subprocess

import pytest

from hostagent.drivers.network.conntrack import Conntrack

pytestmark = [pytest.mark.caps("root", "netns", "nft"), pytest.mark.usefixtures("own_network")]
TRACKING = """
table inet tracking {
  chain c_out {
    type filter hook output priority mangle; policy accept;
    udp dport 4001 ct mark set 0x10001
    udp dport 4002 ct mark set 0x20001
    ct state new counter
  }
}
"""


@pytest.fixture
def conntrack():
    subprocess.run(["nft", "-f", "-"], input=TRACKING.encode(), check=True, timeout=10)
    made = Conntrack()
    yield made
    made.close()


def send(address: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sender:
        sender.connect((address, port))
        sender.send(b"x")
        return sender.getsockname()[1]


async def test_flows_are_found_by_address_and_mark(conntrack):
    ports = {(address, port): send(address, port) for address in ("127.0.0.1", "127.0.0.2", "::1") for port in (4001, 4002)}

    found = await conntrack.flows(addresses=["127.0.0.2"])
    assert {(f.original.destination, f.original.destination_port, f.original.source_port) for f in found} == {
        ("127.0.0.2", port, ports["127.0.0.2", port]) for port in (4001, 4002)
    }
    assert all(flow.protocol == 17 and flow.reply.source == "127.0.0.2" and flow.timeout_seconds > 0 for flow in found)
    sixth = await conntrack.flows(addresses=["::1"])
    assert {(f.original.destination, f.mark) for f in sixth} == {("::1", 0x10001), ("::1", 0x20001)}
    assert len(await conntrack.flows(mark=0x10000, mask=0xFF0000)) == 3
    assert await conntrack.flows(addresses=[]) == []
    assert await conntrack.count() >= 6


async def test_flows_are_deleted_one_by_one_and_by_mark(conntrack):
    for address in ("127.0.0.1", "127.0.0.2", "::1"):
        for port in (4001, 4002):
            send(address, port)
    chosen = await conntrack.flows(addresses=["127.0.0.2"])

    assert await conntrack.delete(chosen) == 2
    assert await conntrack.delete(chosen) == 0
    assert await conntrack.flows(addresses=["127.0.0.2"]) == []
    await conntrack.delete_marked(0x10000, 0xFF0000)
    assert {flow.mark for flow in await conntrack.flows(addresses=["127.0.0.1", "::1"])} == {0x20001}
    with pytest.raises(ValueError, match="every flow"):
        await conntrack.delete_marked(0, 0)
