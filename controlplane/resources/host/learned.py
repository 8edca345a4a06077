"""From an agent's facts to the host's row. The one rule: what placement reads is derived here and nowhere else."""

from __future__ import annotations

from datetime import datetime
from ipaddress import IPv4Address, IPv6Address, ip_interface

from controlplane.models.host import Host
from controlplane.resources.host.conditions import conditions
from hostagent.protocol import codec
from hostagent.protocol.facts import HostFacts


def learn(host: Host, facts: HostFacts, now: datetime) -> None:
    """Writes what was found into the row; the conditions keep their time while they hold."""
    host.facts, host.facts_at = codec.encode(facts), now
    host.agent_version, host.architecture = facts.agent_version, facts.architecture
    host.machine_drivers = machine_drivers(facts, is_qemu_allowed=bool(host.config.get("qemu_on_kvm")))
    host.allocatable_vcpus = facts.schedulable_cpus
    host.allocatable_memory_bytes = facts.schedulable_memory_bytes
    interface = facts.data_interface or host.data_interface
    host.data_interface = interface
    host.data_ipv4, host.data_ipv6 = data_addresses(facts, interface)
    host.tunnel_driver = facts.tunnel_driver
    host.underlay_ipv4, host.underlay_ipv6, host.underlay_mtu_bytes = underlay(facts, interface, host.address)
    since = {(item["type"], item["reason"]): item["since"] for item in host.conditions}  # type: ignore[index,call-overload]
    fresh = conditions(facts, data_interface=interface, now=now)
    for item in fresh:
        item["since"] = since.get((item["type"], item["reason"]), item["since"])  # type: ignore[index,call-overload]
    host.conditions = fresh


def machine_drivers(facts: HostFacts, *, is_qemu_allowed: bool) -> list[str]:
    """What placement may use. Where KVM works, Cloud Hypervisor is meant: QEMU never stands in for it unasked."""
    if facts.kvm.usable and not is_qemu_allowed:
        return [name for name in facts.machine_drivers if name != "qemu"]
    return list(facts.machine_drivers)


def data_addresses(facts: HostFacts, interface: str) -> tuple[IPv4Address | None, IPv6Address | None]:
    """The first address of each family on the data interface that other hosts can route to."""
    ipv4: IPv4Address | None = None
    ipv6: IPv6Address | None = None
    for found in facts.interfaces:
        if found.name != interface:
            continue
        for text in found.addresses:
            address = ip_interface(text).ip
            if address.is_link_local or address.is_loopback:
                continue
            if isinstance(address, IPv4Address):
                ipv4 = ipv4 or address
            else:
                ipv6 = ipv6 or address
    return ipv4, ipv6


def underlay(facts: HostFacts, data_interface: str, address: str) -> tuple[IPv4Address | None, IPv6Address | None, int | None]:
    """Where tunnels reach the host, and the MTU there: the data interface; else the one that SSH reaches, or the first."""
    able = [found for found in facts.interfaces if any(data_addresses(facts, found.name))]
    by_address = [found for found in able if address in {str(ip_interface(text).ip) for text in found.addresses}]
    found = next((item for item in able if item.name == data_interface), None)
    if found is None and not data_interface:
        found = next(iter((*by_address, *able)), None)
    return (*data_addresses(facts, found.name), found.mtu_bytes) if found else (None, None, None)
