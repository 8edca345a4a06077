"""Telling routers of addresses by BGP: a real BIRD on each edge, with a password, and one as their router."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from hostagent.drivers.network.bird import Bird
from hostagent.lib.paths import Paths
from hostagent.lib.wait import until
from hostagent.protocol.network import BgpPeerWanted, BgpWanted
from tests.conformance.conftest import Daemon
from tests.conformance.test_addresses import IPV4, Outside, Place, outside
from tests.conformance.wires import run
from tests.namespaces import inside

__all__ = ["outside"]

BGP_PASSWORD = "planted-72ab"


@contextlib.asynccontextmanager
async def speaking(place: Place, root: Path, *, held_address: str) -> AsyncIterator[Bird]:
    paths = Paths.under(root / place.netns)
    with inside(place.netns):
        daemon = Daemon(paths)
        await daemon.start()
        bird = Bird(daemon.driver, paths)
        router = BgpPeerWanted(address="203.0.113.9", peer_as=65001, password=BGP_PASSWORD)
        routers = BgpWanted(local_as=65010, peers=(router,), port=1790)
        await bird.apply((held_address,), routers)
        assert await bird.is_up((held_address,), routers)
        (found,) = [path for path in root.rglob("bird.conf") if place.netns in str(path)]
        assert (found.stat().st_mode & 0o777, paths.run in found.parents) == (0o600, True), "it goes with the boot"
        assert not await bird.is_up((held_address,), replace(routers, local_as=65011))
        run("ip", "address", "add", f"{held_address}/32", "dev", "lo")
    try:
        yield bird
    finally:
        with inside(place.netns):
            await bird.apply(())
        await daemon.stop()


@pytest.mark.caps("root", "netns", "bird")
async def test_two_edges_tell_a_router_and_one_is_enough(tmp_path: Path, outside: Outside):
    """The client is the router: it spreads over both, and a dead edge is left within the hold time."""
    config = tmp_path / "router.conf"
    config.write_text(
        "log stderr all;\nrouter id 203.0.113.9;\nprotocol device { }\n"
        "protocol kernel { merge paths yes; ipv4 { export all; }; }\n"
        + "".join(
            f"protocol bgp edge{n} {{ local as 65001; neighbor 203.0.113.{n} port 1790 as 65010; hold time 9; "
            f'password "{BGP_PASSWORD}"; '
            "connect retry time 2; connect delay time 1; ipv4 { import all; export none; }; }\n"
            for n in (1, 2)
        )
    )
    argv = ("ip", "netns", "exec", outside.client.netns, "bird", "-f", "-c", str(config), "-s", str(tmp_path / "router.sock"))
    router = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.DEVNULL)

    def ways() -> set[str]:
        found = json.loads(outside.client.run("ip", "-j", "route", "show", f"{IPV4}/32") or "[]")
        return {hop["gateway"] for route in found for hop in route.get("nexthops", [route]) if "gateway" in hop}

    async def by(*numbers: int) -> bool:
        wanted_ways = {f"203.0.113.{number}" for number in numbers}

        async def is_so() -> bool:
            return ways() == wanted_ways

        return await until(is_so, seconds=30)

    try:
        async with speaking(outside.one, tmp_path, held_address=IPV4):
            async with speaking(outside.two, tmp_path, held_address=IPV4):
                assert await by(1, 2)
                outside.client.run("ping", "-c1", "-W2", IPV4)
            assert await by(1)
            outside.client.run("ping", "-c1", "-W2", IPV4)
        assert await by()
    finally:
        router.terminate()
        await router.wait()
