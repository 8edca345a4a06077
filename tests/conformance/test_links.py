"""Every link and route driver; the real ones by packets, in a network namespace of the test's own."""

from __future__ import annotations

import dataclasses
import json
import subprocess

import pytest

from hostagent.drivers.network.fake import FakeLinks, FakeRoutes
from hostagent.drivers.network.links import LinkSet
from hostagent.drivers.network.protocol import LinkDriver, LinkPlan, RouteDriver, RoutePlan, interface_name, peer_name
from hostagent.drivers.network.routes import RouteSet
from hostagent.install.uninstall import remove_network
from hostagent.lib.paths import Paths
from hostagent.protocol.wanted import Generation, NetworkWanted, NicWanted, RouteWanted

REAL = pytest.param("real", marks=pytest.mark.caps("root", "netns"))
ONE = Generation(epoch=1, number=1)
NIC = NicWanted(
    id="nic_000000000001", generation=ONE, mac="06:00:00:00:00:01", ipv4="10.93.0.2", ipv6="fd00:93::2", mtu_bytes=1420
)
TAP = LinkPlan(nic=NIC, kind="tap", interface=interface_name(NIC.id), uid=1234)
VETH = LinkPlan(nic=NIC, kind="veth", interface=interface_name(NIC.id), peer=peer_name(NIC.id))


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10).stdout


def make_data_network() -> None:
    ip("link", "add", "data0", "type", "veth", "peer", "name", "data1")
    ip("address", "add", "192.0.2.1/24", "dev", "data0")
    ip("address", "add", "2001:db8::1/64", "dev", "data0", "nodad")
    for name in ("data0", "data1"):
        ip("link", "set", name, "up")


@pytest.fixture(params=["fake", REAL])
def links(request: pytest.FixtureRequest) -> LinkDriver:
    if request.param == "fake":
        return FakeLinks()
    request.getfixturevalue("own_network")
    return LinkSet()


@pytest.fixture(params=["fake", REAL])
def routes(request: pytest.FixtureRequest) -> RouteDriver:
    if request.param == "fake":
        return FakeRoutes()
    request.getfixturevalue("own_network")
    make_data_network()
    return RouteSet()


@pytest.mark.parametrize("plan", [TAP, VETH], ids=["tap", "veth"])
async def test_a_link_lives_its_life(links, plan):
    assert await links.observe(plan) is None
    await links.remove(plan.interface)

    made = await links.apply(plan)
    assert (made.nic_id, made.kind, made.is_complete, made.mtu_bytes) == (NIC.id, plan.kind, True, 1420)
    assert await links.apply(plan) == made == await links.observe(plan)
    assert await links.interfaces() == (plan.interface,)

    await links.remove(plan.interface)
    assert await links.observe(plan) is None
    assert await links.interfaces() == ()


async def test_routes_are_replaced_as_a_whole(routes):
    def plan(*pairs: tuple[str, str]) -> RoutePlan:
        wanted = tuple(RouteWanted(destination_cidr=destination, via=via) for destination, via in pairs)
        return RoutePlan(wanted=NetworkWanted(id="routes", generation=ONE, routes=wanted))

    first = (("10.93.1.1/32", "192.0.2.2"), ("fd00:93::1:1/128", "2001:db8::2"))
    second = (("10.93.1.1/32", "192.0.2.3"), ("10.93.2.0/24", "192.0.2.2"))
    assert await routes.observe() is None
    await routes.remove()
    for pairs in (first, first, second):
        await routes.apply(plan(*pairs))
        seen = await routes.observe()
        assert {(route.destination_cidr, route.via) for route in seen.routes} == set(pairs)
    await routes.remove()
    assert await routes.observe() is None


async def test_encrypted_networks_without_a_way_are_refused(routes):
    wanted = NetworkWanted(
        id="routes",
        generation=ONE,
        routes=(RouteWanted(destination_cidr="10.93.1.1/32", via="192.0.2.2"),),
        unreachable_cidrs=("10.93.1.0/24", "fd00:93::/64"),
    )
    for document in (wanted, wanted, dataclasses.replace(wanted, unreachable_cidrs=("10.93.1.0/24",))):
        await routes.apply(RoutePlan(wanted=document))
        seen = await routes.observe()
        assert (seen.routes, seen.unreachable_cidrs) == (document.routes, document.unreachable_cidrs)
    await routes.remove()
    assert await routes.observe() is None


@pytest.mark.caps("root", "netns")
@pytest.mark.usefixtures("own_network")
class TestKernel:
    """What only the kernel shows."""

    async def test_the_host_side_is_the_same_for_every_machine(self):
        await LinkSet().apply(TAP)

        link = json.loads(ip("-json", "-details", "address", "show", "dev", TAP.interface))[0]
        assert link["address"] == "02:00:00:00:00:01"
        assert {(a["local"], a["prefixlen"]) for a in link["addr_info"]} == {("169.254.1.1", 32), ("fe80::1", 64)}
        assert link["linkinfo"]["info_data"]["user"] == "1234" or link["linkinfo"]["info_data"]["user"] == 1234
        neighbours = json.loads(ip("-json", "neighbour", "show", "dev", TAP.interface, "nud", "permanent"))
        assert {(n["dst"], n["lladdr"]) for n in neighbours} == {(NIC.ipv4, NIC.mac), (NIC.ipv6, NIC.mac)}
        for family, address in (("-4", NIC.ipv4), ("-6", NIC.ipv6)):
            assert json.loads(ip("-json", family, "route", "get", address))[0]["dev"] == TAP.interface

    @pytest.mark.parametrize(
        "damage",
        [
            ("link", "set", TAP.interface, "down"),
            ("link", "set", TAP.interface, "mtu", "1500"),
            ("address", "del", "169.254.1.1/32", "dev", TAP.interface),
            ("route", "del", f"{NIC.ipv4}/32"),
            ("-6", "route", "del", f"{NIC.ipv6}/128"),
            ("neighbour", "replace", NIC.ipv4, "lladdr", "06:66:66:66:66:66", "dev", TAP.interface),
            ("neighbour", "del", NIC.ipv6, "dev", TAP.interface),
        ],
        ids=" ".join,
    )
    async def test_drift_is_seen_and_repaired(self, damage):
        links = LinkSet()
        await links.apply(TAP)
        ip(*damage)

        assert not (await links.observe(TAP)).is_complete
        assert (await links.apply(TAP)).is_complete

    async def test_links_and_routes_of_others_are_left_alone(self):
        ip("link", "add", "bp0", "type", "veth", "peer", "name", "bp1")
        make_data_network()
        ip("route", "add", "10.93.9.0/24", "via", "192.0.2.9")
        wanted = NetworkWanted(
            id="routes", generation=ONE, routes=(RouteWanted(destination_cidr="10.93.9.0/24", via="192.0.2.2"),)
        )

        await RouteSet().apply(RoutePlan(wanted=wanted))
        await RouteSet().remove()
        assert "via 192.0.2.9" in ip("route", "show", "10.93.9.0/24")
        assert await LinkSet().interfaces() == ()
        with pytest.raises(ValueError, match="not a link of this agent"):
            await LinkSet().remove("bp0")

    async def test_a_machine_here_is_never_sent_elsewhere(self):
        """A stale route for a machine that has come to this host loses against the machine's own link."""
        make_data_network()
        stale = NetworkWanted(
            id="routes", generation=ONE, routes=(RouteWanted(destination_cidr=f"{NIC.ipv4}/32", via="192.0.2.2"),)
        )
        await RouteSet().apply(RoutePlan(wanted=stale))
        await LinkSet().apply(TAP)

        assert json.loads(ip("-json", "route", "get", NIC.ipv4))[0]["dev"] == TAP.interface

    async def test_routes_lead_into_a_tunnel_and_change_over_without_a_gap(self):
        """Both families; what `ip monitor` saw holds no deletion."""
        make_data_network()
        for name in ("bwa00000000", "bwb00000000"):
            ip("link", "add", name, "type", "veth", "peer", "name", f"p{name}")
            ip("link", "set", name, "up")
        driver = RouteSet({"a": "bwa00000000", "b": "bwb00000000"})
        destinations = ("10.93.1.1/32", "fd00:93::1:1/128")

        def document(**way: str) -> RoutePlan:
            found = tuple(RouteWanted(destination_cidr=cidr, **{"via": "", **way}) for cidr in destinations)
            return RoutePlan(wanted=NetworkWanted(id="routes", generation=ONE, routes=found), data_interface="data0")

        await driver.apply(document(slot="a"))
        with subprocess.Popen(["ip", "monitor", "route"], stdout=subprocess.PIPE, text=True) as monitor:
            try:
                for slot in ("b", "a"):
                    seen = await driver.apply(document(slot=slot))
                    assert {(r.destination_cidr, r.slot) for r in seen.routes} == {(cidr, slot) for cidr in destinations}
                    for address in ("10.93.1.1", "fd00:93::1:1"):
                        assert json.loads(ip("-json", "route", "get", address))[0]["dev"] == f"bw{slot}00000000"
            finally:
                monitor.terminate()
            assert "Deleted" not in monitor.stdout.read()
        await driver.apply(RoutePlan(wanted=NetworkWanted(id="routes", generation=ONE, routes=()), data_interface="data0"))
        assert await driver.observe() is None

    async def test_a_link_changes_its_kind(self):
        await LinkSet().apply(TAP)
        observed = await LinkSet().apply(VETH)

        assert (observed.kind, observed.is_complete) == ("veth", True)

    async def test_packets_reach_a_machine_at_its_address(self):
        """The far end in a namespace, set up as a guest is by its seed."""
        plan = dataclasses.replace(VETH, nic=dataclasses.replace(NIC, mac="06:00:00:00:93:02"))
        await LinkSet().apply(plan)
        with subprocess.Popen(["unshare", "-n", "sh", "-c", "echo; exec sleep 60"], stdout=subprocess.PIPE) as guest:
            try:
                assert guest.stdout.readline() == b"\n"
                ip("link", "set", plan.peer, "netns", str(guest.pid))
                inside = ("nsenter", "-t", str(guest.pid), "-n", "ip")
                for words in (
                    ("link", "set", plan.peer, "up"),
                    ("address", "add", f"{NIC.ipv4}/32", "dev", plan.peer),
                    ("address", "add", f"{NIC.ipv6}/128", "dev", plan.peer, "nodad"),
                    ("route", "add", "default", "via", "169.254.1.1", "dev", plan.peer, "onlink"),
                    ("-6", "route", "add", "default", "via", "fe80::1", "dev", plan.peer, "onlink"),
                ):
                    subprocess.run([*inside, *words], check=True, timeout=10)
                for address in (NIC.ipv4, NIC.ipv6):
                    subprocess.run(["ping", "-c1", "-W5", address], check=True, capture_output=True, timeout=10)
            finally:
                guest.kill()

    async def test_two_agents_in_one_namespace_touch_only_their_own(self, tmp_path):
        """Two gateways of two deployments on one machine: what one applies or takes away is not the other's."""
        make_data_network()
        paths = [dataclasses.replace(Paths.under(tmp_path / name), machine_id=tmp_path / f"{name}.id") for name in "ab"]
        for number, path in enumerate(paths):
            path.machine_id.write_text(f"{number}" * 32)
        nics = [dataclasses.replace(NIC, id=f"nic_00000000000{n}", ipv4=f"10.93.{n}.2", ipv6=f"fd00:93::{n}:2") for n in (1, 2)]
        for number, (path, nic) in enumerate(zip(paths, nics, strict=True), start=1):
            await LinkSet(path.owner()).apply(LinkPlan(nic=nic, kind="tap", interface=interface_name(nic.id), uid=1))
            away = RouteWanted(destination_cidr=f"10.94.{number}.0/24", via="192.0.2.2")
            refused = f"10.95.{number}.0/24"
            document = NetworkWanted(id="routes", generation=ONE, routes=(away,), unreachable_cidrs=(refused,))
            seen = await RouteSet(record=path.routes).apply(RoutePlan(wanted=document))
            assert (seen.routes, seen.unreachable_cidrs) == ((away,), (refused,))
        first, second = paths
        assert await LinkSet(first.owner()).interfaces() == (interface_name(nics[0].id),)
        subprocess.run(["nft", "add table inet bedplate"], check=True)

        remove_network(first)

        assert [name for name in interfaces() if name.startswith("bp")] == [interface_name(nics[1].id)]
        assert "10.94.2.0/24" in (left := ip("route", "show", "proto", "191"))
        assert "unreachable 10.95.2.0/24" in left
        assert "10.94.1.0/24" not in left
        assert "10.95.1.0/24" not in left
        assert "inet bedplate" in subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout

        remove_network(second)

        assert [name for name in interfaces() if name.startswith("bp")] == []
        assert ip("route", "show", "proto", "191") == ""
        assert subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout == ""


def interfaces() -> list[str]:
    return [link["ifname"] for link in json.loads(ip("-json", "link"))]
