"""The table as it is written, word for word: a changed rule must be seen in review. Packets show elsewhere what it does."""

from __future__ import annotations

from hostagent.drivers.network.firewall import Firewalls
from hostagent.drivers.network.nft import NftProgram
from hostagent.drivers.network.protocol import RulePlan
from hostagent.protocol.network import FirewallMemberWanted, FirewallRuleWanted, FirewallWanted, PolicyWanted
from hostagent.protocol.wanted import Generation, NicWanted

ONE = Generation(epoch=1, number=1)
NIC = NicWanted(id="nic_01hf7yat000000000000000000", generation=ONE, mac="06:00:00:00:00:01", ipv4="10.1.2.3", ipv6="fd00::3")


def test_the_table_of_a_host_with_one_machine(golden):
    firewalls = Firewalls()
    firewalls.set_policy(
        PolicyWanted(
            id="policy",
            generation=ONE,
            infrastructure_cidrs=("192.0.2.0/24", "2001:db8::/64"),
            private_cidrs=("10.0.0.0/8", "fd00::/8"),
            is_enforced=True,
        )
    )
    firewalls.set_nic(NIC)
    rules = (
        FirewallRuleWanted(
            direction="ingress", action="allow", protocol="tcp", cidrs=("0.0.0.0/0", "::/0"), port_first=22, port_last=22
        ),
        FirewallRuleWanted(direction="ingress", action="deny", protocol="any", cidrs=("198.51.100.0/24",)),
        FirewallRuleWanted(direction="egress", action="deny", protocol="udp", cidrs=("::/0",), port_first=25, port_last=26),
    )
    member = FirewallMemberWanted(nic_id=NIC.id, ipv4=NIC.ipv4, ipv6=NIC.ipv6)
    firewalls.set_firewall(FirewallWanted(id="fw_1", generation=ONE, rules=rules, members=(member,)), "fw_1")

    golden("rules.txt", NftProgram().render(RulePlan(parts=firewalls.parts())))
