"""Every rule driver; the real ones in a network namespace of the test's own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess

import pytest

from hostagent.drivers.network.balancer_buckets import fill
from hostagent.drivers.network.balancer_rules import FAMILIES, service_part, shared_part
from hostagent.drivers.network.fake import FakeRules
from hostagent.drivers.network.firewall_table import (
    KINDS,
    combination_part,
    firewall_boxes,
    firewall_part,
    nic_part,
    policy_part,
)
from hostagent.drivers.network.nft import NftHelper, NftProgram
from hostagent.drivers.network.protocol import RulePart, RulePlan, SetSpec
from hostagent.drivers.network.ruleset import Ruleset
from hostagent.drivers.network.table import difference
from hostagent.protocol.errors import AgentError
from hostagent.protocol.network import (
    BackendWanted,
    FirewallRuleWanted,
    FirewallWanted,
    ListenerWanted,
    LoadBalancerWanted,
    PolicyWanted,
)
from hostagent.protocol.wanted import Generation, NicWanted

ONE = Generation(epoch=1, number=1)
HOSTS = SetSpec(declaration="type ipv4_addr : verdict;", key=("ipv4_addr",), data=("verdict",))
RANGES = SetSpec(declaration="type inet_service; flags interval;", key=("inet_service",))
EMPTY = RulePlan(parts={"base": RulePart(chains={"early_machine": ()})})
BASE = RulePart(
    sets={"m_hosts": HOSTS},
    chains={"forward_machine": ("ip daddr vmap @m_hosts", 'counter name "n_seen"')},
    objects={"counter n_seen": ""},
)


def host(number: int, port: str = "22") -> RulePart:
    return RulePart(
        sets={f"s_{number}": RANGES},
        chains={f"h_{number}": (f"tcp dport @s_{number} accept", "drop")},
        elements={"m_hosts": {f"10.0.0.{number}": f"goto h_{number}"}, f"s_{number}": {port: ""}},
    )


def nft(*arguments: str) -> None:
    subprocess.run(["nft", *arguments], check=True, timeout=10)


def words(listing: str) -> list[str]:
    """Sets and chains may be listed in another order."""
    return sorted(re.findall(r"[\w.:/-]+", re.sub(r"expires \S+", "", listing)))


def in_order(listing: str) -> dict[str, str]:
    """The rules of each chain as they stand."""
    return dict(re.findall(r"chain (\S+) \{\n(.*?)\n\t\}", listing, re.DOTALL))


KERNEL = pytest.mark.caps("root", "netns", "nft")


@pytest.fixture(params=["fake", pytest.param("helper", marks=KERNEL), pytest.param("program", marks=KERNEL)])
async def rules(request: pytest.FixtureRequest):
    if request.param == "fake":
        yield FakeRules()
        return
    request.getfixturevalue("own_network")
    driver = NftHelper() if request.param == "helper" else NftProgram()
    yield driver
    await driver.close()


async def test_a_table_lives_its_life(rules):
    assert await rules.observe() is None
    await rules.remove()

    first = await rules.apply(EMPTY)
    assert (await rules.observe()).generation == first.generation
    again = await rules.apply(RulePlan(parts={"base": BASE, "host/1": host(1)}))
    assert again.generation > first.generation
    assert "h_1" in await rules.read("list table inet bedplate")

    await rules.remove()
    assert await rules.observe() is None


async def test_changes_lead_to_what_a_new_table_would_be(rules):
    ruleset = Ruleset(rules)
    await ruleset.start({"base": BASE, "host/1": host(1), "host/2": host(2)})
    await ruleset.put({"host/3": host(3), "host/2": None, "host/1": host(1, "80-443")})

    changed = await rules.read("list table inet bedplate")
    await ruleset.repair()
    anew = await rules.read("list table inet bedplate")
    assert words(changed) == words(anew)
    assert "h_2" not in anew
    await ruleset.put(dict.fromkeys(ruleset.parts))
    assert await rules.observe() is None


EVERY_TYPE = RulePart(
    chains={"h_1": ("accept",)},
    objects={"counter n_one": ""},
    sets={
        "m_verdict": SetSpec(declaration="type ifname : verdict;", key=("ifname",), data=("verdict",)),
        "s_counted": SetSpec(
            declaration="type ifname . ether_addr . ipv4_addr; counter;", key=("ifname", "ether_addr", "ipv4_addr")
        ),
        "s_boxes": SetSpec(
            declaration="type inet_proto . inet_service . ipv6_addr; flags interval;",
            key=("inet_proto", "inet_service", "ipv6_addr"),
        ),
        "s_prefixes": SetSpec(declaration="type ipv4_addr; flags interval;", key=("ipv4_addr",)),
        "m_buckets": SetSpec(
            declaration="typeof ip daddr . meta l4proto . th dport . numgen inc mod 251 : meta mark;",
            key=("ipv4_addr", "inet_proto", "inet_service", "number"),
            data=("mark",),
        ),
        "m_backends": SetSpec(
            declaration="type mark : ipv6_addr . inet_service;", key=("mark",), data=("ipv6_addr", "inet_service")
        ),
        "s_targets": SetSpec(declaration="typeof iifname . @th,64,128;", key=("ifname", "number128")),
        "s_passing": SetSpec(
            declaration="type ipv4_addr . inet_service; size 100; timeout 1h;", key=("ipv4_addr", "inet_service")
        ),
        "m_counters": SetSpec(declaration="type ipv4_addr : counter;", key=("ipv4_addr",), data=("name",)),
        "a_hosts": SetSpec(declaration="type ifname . ipv4_addr;", key=("ifname", "ipv4_addr")),
    },
)
ELEMENTS = {
    "m_verdict": {'"bp1"': "goto h_1", '"bp2"': "drop", '"bp3"': "return"},
    "s_counted": {'"bp000000000001" . 06:00:00:00:00:01 . 10.0.0.1': ""},
    "s_boxes": {
        "6 . 22-23 . fd00::/8": "",
        "0-255 . 0-65535 . 2001:db8::1-2001:db8::7": "",
        "tcp . 80 . ::1": "",
    },
    "s_prefixes": {"10.0.0.0/8": "", "192.0.2.1": ""},
    "m_buckets": {f"192.0.2.1 . tcp . 80 . {number}": f"{number + 1:#010x}" for number in range(251)},
    "m_backends": {"0x00000001": "fd00::1 . 8080"},
    "s_targets": {'"bp1" . 0xfd000000000000000000000000000001': ""},
    "s_passing": {"10.0.0.1 . 80": ""},
    "m_counters": {"10.0.0.1": '"n_one"'},
    "a_hosts": {'"bp1" . 10.0.0.1': ""},
}


async def test_elements_are_what_nft_would_have_made(rules):
    """Whichever way they go to the kernel; all that goes at once is there, and all that is taken out is gone."""
    ruleset = Ruleset(rules)
    await ruleset.start({"base": EVERY_TYPE})
    for name, pairs in ELEMENTS.items():
        await ruleset.put({name: RulePart(elements={name: pairs})})
    moved = dict.fromkeys(list(ELEMENTS["m_buckets"])[:63], "0x0000ffff")
    await ruleset.put({"m_buckets": RulePart(elements={"m_buckets": ELEMENTS["m_buckets"] | moved})})

    one_by_one = await rules.read("list ruleset")
    await ruleset.repair()
    assert words(one_by_one) == words(await rules.read("list ruleset"))
    await ruleset.put(dict.fromkeys(ELEMENTS))
    emptied = await rules.read("list ruleset")
    await ruleset.repair()
    assert words(emptied) == words(await rules.read("list ruleset"))


FIREWALL = FirewallWanted(
    id="fw_000000000001",
    generation=ONE,
    rules=tuple(
        FirewallRuleWanted(
            direction=way, action=action, protocol="tcp", cidrs=("10.1.0.0/16", "fd00::/9"), port_first=port, port_last=90
        )
        for port, (way, action) in enumerate(KINDS, 80)
    ),
    members=(),
)
IN_TURNS = LoadBalancerWanted(
    id="lb_000000000001",
    generation=ONE,
    vips=("203.0.113.1", "2001:db8::1"),
    listeners=(ListenerWanted(protocol="tcp", port=80, target_port=8080),),
    backends=(BackendWanted(id="bk_1", ipv4="10.0.0.1", ipv6="fd00::1"),),
    algorithm="round_robin",
)


def firewalled() -> dict[str, RulePart]:
    """One that allows and denies both ways, one that does neither, and machines behind them."""
    name = FIREWALL.id
    firewall = firewall_part(name, firewall_boxes(FIREWALL))
    nics = [
        NicWanted(id=f"nic_{n:012}", generation=ONE, mac=f"06:00:00:00:00:0{n}", ipv4=f"10.0.0.{n}", ipv6=f"fd00::{n}")
        for n in (1, 2)
    ]
    return {
        f"firewall/{name}": firewall,
        "combination/1": combination_part({name: firewall}, restricts_egress=True),
        "combination/2": combination_part({"fw_000000000002": RulePart()}, restricts_egress=False),
        "nic/1": nic_part(nics[0], [name], filters_egress=True),
        "nic/2": nic_part(nics[1], ["fw_000000000002"], filters_egress=True),
    }


async def test_firewalls_and_services_are_what_nft_would_have_made(rules):
    """They come and go without nft, as long as it is warm: it would first read all that is there."""
    tables = dict.fromkeys(FAMILIES, fill({"bk_1": 1}))
    service = service_part(IN_TURNS, {(8080, "bk_1"): 1}, tables)
    ruleset = Ruleset(rules)
    await ruleset.start({"policy": policy_part(PolicyWanted(id="policy", generation=ONE)), "balancer": shared_part()})
    if isinstance(rules, NftHelper):
        await rules._end()
    await ruleset.put(firewalled())
    await ruleset.put({"service": service})
    assert getattr(rules, "pid", None) is None, "nft was asked"

    made = await rules.read("list ruleset")
    await ruleset.repair()
    anew = await rules.read("list ruleset")
    assert words(made) == words(anew)
    assert in_order(made) == in_order(anew)
    assert in_order(made) or isinstance(rules, FakeRules)
    if isinstance(rules, NftHelper):
        await rules._end()
    await ruleset.put(dict.fromkeys([*firewalled(), "service"]))
    assert getattr(rules, "pid", None) is None, "nft was asked"
    emptied = await rules.read("list ruleset")
    await ruleset.repair()
    assert words(emptied) == words(await rules.read("list ruleset"))


async def test_elements_are_refused_together(rules):
    """One that is wrong keeps the others out."""
    await rules.apply(RulePlan(parts={"base": EVERY_TYPE}))
    before = await rules.read("list ruleset")
    elements = [RulePart(elements={"s_boxes": ELEMENTS["s_boxes"], "m_verdict": {'"bp1"': "goto h_missing"}})]

    with pytest.raises(AgentError) as caught:
        await rules.change(difference((), elements, EVERY_TYPE.sets))
    assert caught.value.code == "rules.refused"
    assert words(await rules.read("list ruleset")) == words(before)


async def test_a_refused_change_leaves_everything_as_it_was(rules):
    await rules.apply(RulePlan(parts={"base": BASE, "host/1": host(1)}))
    before = await rules.read("list table inet bedplate")
    wrong = difference([host(9)], [host(2)], {"m_hosts": HOSTS})

    with pytest.raises(AgentError) as caught:
        await rules.change(wrong)
    assert caught.value.code == "rules.refused"
    assert await rules.read("list table inet bedplate") == before


async def test_a_change_to_a_table_that_somebody_took_away_writes_it_anew(rules):
    ruleset = Ruleset(rules)
    await ruleset.start({"base": BASE, "host/1": host(1)})
    await rules.remove()
    await ruleset.put({"host/2": host(2)})

    listed = await rules.read("list table inet bedplate")
    assert "h_1" in listed
    assert "h_2" in listed


async def test_nothing_is_written_for_nothing(rules):
    ruleset = Ruleset(rules)
    await ruleset.start({})
    assert await rules.observe() is None
    await ruleset.put({"base": BASE})
    assert await rules.observe() is not None


@KERNEL
@pytest.mark.usefixtures("own_network")
class TestHelper:
    async def test_one_that_was_killed_is_started_again(self):
        driver = NftHelper()
        ruleset = Ruleset(driver)
        try:
            await ruleset.start({"base": BASE})
            first = driver.pid
            os.kill(first, signal.SIGKILL)
            await ruleset.put({"host/1": host(1)})
            assert driver.pid not in (None, first)
            assert "h_1" in await driver.read("list table inet bedplate")
        finally:
            await ruleset.close()

    async def test_one_that_takes_too_long_is_killed(self):
        driver = NftHelper(deadline_seconds=10)
        try:
            await driver.apply(EMPTY)
            os.kill(driver.pid, signal.SIGSTOP)
            driver._deadline_seconds = 0.2
            with pytest.raises(AgentError) as caught:
                await driver.apply(EMPTY)
            assert caught.value.code == "rules.timed_out"
            assert driver.pid is None
            driver._deadline_seconds = 10
            await driver.apply(EMPTY)
        finally:
            await driver.close()

    async def test_it_ends_with_the_agent(self):
        """Its stdin closes when the agent is gone, however that ended."""
        driver = NftHelper()
        await driver.apply(EMPTY)
        process = driver._process
        process.stdin.close()
        async with asyncio.timeout(10):
            assert await process.wait() == 0
        await driver.close()

    @pytest.mark.parametrize("kind", [NftHelper, NftProgram])
    async def test_what_others_change_is_told_apart_from_what_we_do(self, kind):
        driver = kind()
        ruleset = Ruleset(driver)
        await ruleset.start({"base": BASE, "host/1": host(1)})
        assert await ruleset.check() is None
        await ruleset.put({"host/2": host(2)})
        nft("add", "table", "inet", "other")
        assert await ruleset.check() is None

        for words in (
            ("flush", "ruleset"),
            ("delete", "element", "inet", "bedplate", "m_hosts", "{ 10.0.0.1 }"),
            ("flush", "chain", "inet", "bedplate", "h_1"),
            ("add", "rule", "inet", "bedplate", "forward_machine", "accept"),
        ):
            nft(*words)
            assert await ruleset.check() == "nft", words
            assert not ruleset.is_intact
            await ruleset.repair()
            assert await ruleset.check() is None
        await ruleset.close()

    async def test_one_agent_writes_in_a_network_namespace(self):
        first, second = NftProgram(), NftProgram()
        await first.apply(EMPTY)
        with pytest.raises(AgentError) as caught:
            await second.apply(EMPTY)
        assert caught.value.code == "rules.taken"
        assert f"process {os.getpid()}: " in caught.value.message, "who it is"
        assert "network namespace of its own" in caught.value.message, "what to do"
        await first.close()
        await second.apply(EMPTY)
        await second.close()

    async def test_writers_beside_us_are_left_alone(self):
        nft("add", "table", "inet", "other")
        driver = NftProgram()
        await driver.apply(EMPTY)
        await driver.remove()
        listed = subprocess.run(["nft", "list", "tables"], check=True, capture_output=True, text=True, timeout=10).stdout
        assert listed.split() == ["table", "inet", "other"]
        await driver.close()
