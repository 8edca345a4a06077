"""The boxes of a firewall mean what its rules say, word for word, and never overlap; small changes lead to the same table."""

from __future__ import annotations

import ipaddress
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from hostagent.drivers.network.firewall import Firewalls
from hostagent.drivers.network.firewall_sets import box_text, boxes, merged, range_text
from hostagent.protocol.network import FirewallMemberWanted, FirewallRuleWanted, FirewallWanted, PolicyWanted
from hostagent.protocol.wanted import Generation, NicWanted

ONE = Generation(epoch=1, number=1)
PROTOCOLS = {"tcp": (6, 6), "udp": (17, 17), "icmp": (1, 58)}


def means(rule: FirewallRuleWanted, protocol: int, port: int, far: str) -> bool:
    """What the words of a rule say."""
    address = ipaddress.ip_address(far)
    if rule.protocol != "any" and protocol != PROTOCOLS[rule.protocol][address.version == 6]:
        return False
    if rule.port_last and not rule.port_first <= port <= rule.port_last:
        return False
    return any(address in ipaddress.ip_network(cidr) for cidr in rule.cidrs)


cidrs = st.one_of(
    st.tuples(st.integers(0, 255), st.integers(22, 32)).map(
        lambda pair: str(ipaddress.ip_network((0x0A000000 + pair[0] * 4, pair[1]), strict=False))
    ),
    st.tuples(st.integers(0, 255), st.integers(118, 128)).map(
        lambda pair: str(ipaddress.ip_network(((0xFD << 120) + pair[0] * 4, pair[1]), strict=False))
    ),
    st.sampled_from(["0.0.0.0/0", "::/0", "255.255.255.255/32"]),
)


@st.composite
def rules(draw, *, direction="ingress", action="allow"):
    protocol = draw(st.sampled_from(["tcp", "udp", "icmp", "any"]))
    ports = sorted(draw(st.tuples(st.integers(1, 12), st.integers(1, 12)))) if draw(st.booleans()) else (0, 0)
    first, last = ports if protocol in ("tcp", "udp") else (0, 0)
    return FirewallRuleWanted(
        direction=direction if direction != "any" else draw(st.sampled_from(["ingress", "egress"])),
        action=action if action != "any" else draw(st.sampled_from(["allow", "deny"])),
        protocol=protocol,
        cidrs=tuple(draw(st.lists(cidrs, max_size=3))),
        port_first=first,
        port_last=last,
    )


@given(st.lists(rules(), max_size=6), st.data())
def test_boxes_are_the_rules(chosen, data):
    for version, far in ((4, "10.0.{}.{}"), (6, "fd00::{:x}{:02x}")):
        found = boxes(chosen, version)
        protocol = data.draw(st.sampled_from([6, 17, 1, 58, 47, 0, 255]))
        port = data.draw(st.integers(0, 14)) if protocol in (6, 17) else 0
        address = far.format(data.draw(st.integers(0, 4)), data.draw(st.integers(0, 255)))
        number = int(ipaddress.ip_address(address))
        inside = [
            box
            for box in found
            if box.protocols[0] <= protocol <= box.protocols[1]
            and box.ports[0] <= port <= box.ports[1]
            and box.addresses[0] <= number <= box.addresses[1]
        ]
        assert bool(inside) == any(means(rule, protocol, port, address) for rule in chosen)


@given(st.lists(rules(), max_size=6))
def test_boxes_never_overlap(chosen):
    for version in (4, 6):
        for one, other in itertools.combinations(boxes(chosen, version), 2):
            assert any(a[1] < b[0] or b[1] < a[0] for a, b in zip(one, other, strict=True))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)).map(lambda pair: (pair[0], pair[0] + pair[1]))))
def test_merged_ranges_cover_the_same_and_do_not_touch(ranges):
    found = merged(ranges)
    assert {n for a, b in found for n in range(a, b + 1)} == {n for a, b in ranges for n in range(a, b + 1)}
    assert all(before[1] + 1 < after[0] for before, after in itertools.pairwise(found))


def test_elements_are_written_as_nft_reads_them():
    both = [
        FirewallRuleWanted(
            direction="ingress", action="allow", protocol="tcp", cidrs=("10.0.0.0/25",), port_first=80, port_last=81
        ),
        FirewallRuleWanted(
            direction="ingress", action="allow", protocol="tcp", cidrs=("10.0.0.128/25",), port_first=80, port_last=81
        ),
    ]
    assert [box_text(box, 4) for box in boxes(both, 4)] == ["6 . 80-81 . 10.0.0.0/24"]
    assert range_text((0x0A000001, 0x0A000003), 4) == "10.0.0.1-10.0.0.3"
    assert range_text((0, (1 << 128) - 1), 6) == "::/0"
    everything = FirewallRuleWanted(direction="egress", action="deny", protocol="any", cidrs=("192.0.2.7/32", "fd00::/8"))
    assert [box_text(box, 6) for box in boxes([everything], 6)] == ["0-255 . 0-65535 . fd00::/8"]


NICS = [
    NicWanted(id=f"nic_{n:012}", generation=ONE, mac=f"06:00:00:00:00:{n:02x}", ipv4=f"10.0.1.{n}", ipv6=f"fd00::1:{n:x}")
    for n in range(1, 4)
]


@st.composite
def changes(draw):
    kind = draw(st.sampled_from(["policy", "nic", "firewall"]))
    if kind == "policy":
        return kind, "policy", draw(st.sampled_from([None, ("192.0.2.0/24",), ()]))
    if kind == "nic":
        return kind, draw(st.sampled_from(NICS)), draw(st.booleans())
    chosen = draw(st.lists(rules(direction="any", action="any"), max_size=3))
    return (
        kind,
        draw(st.sampled_from(["fw_1", "fw_2"])),
        draw(st.one_of(st.none(), st.just((chosen, draw(st.sets(st.sampled_from(range(3)))))))),
    )


def carry_out(firewalls: Firewalls, change) -> dict:
    kind, subject, value = change
    if kind == "policy":
        wanted = None if value is None else PolicyWanted(id="policy", generation=ONE, infrastructure_cidrs=value)
        return firewalls.set_policy(wanted).parts
    if kind == "nic":
        return firewalls.set_nic(subject) if value else firewalls.drop_nic(subject.id)
    if value is None:
        return firewalls.set_firewall(None, subject).parts
    members = tuple(FirewallMemberWanted(nic_id=NICS[n].id, ipv4=NICS[n].ipv4, ipv6=NICS[n].ipv6) for n in sorted(value[1]))
    document = FirewallWanted(id=subject, generation=ONE, rules=tuple(value[0]), members=members)
    return firewalls.set_firewall(document, subject).parts


@settings(max_examples=200)
@given(st.lists(changes(), max_size=12))
def test_small_changes_lead_to_the_same_table(steps):
    """What the parts are after each change is what a host that starts with these documents writes."""
    firewalls, table = Firewalls(), {}
    for step in steps:
        parts = carry_out(firewalls, step)
        table = {name: part for name, part in (table | parts).items() if part is not None}
        assert table == firewalls.parts()
