"""CPU topology, memory, disks and PCI devices from sysfs. The one rule: absent files mean unknown, never zero by accident."""

from __future__ import annotations

import os
from pathlib import Path

from hostagent.facts.sysfs import PROC, SYS, cpu_list, entries, number, text
from hostagent.protocol.facts import CpuFact, DiskFact, NumaNodeFact, PciFact

_VIRTUAL_DISKS = ("loop", "ram", "zram", "nbd", "sr", "fd", "md", "dm-")
_SECTOR_BYTES = 512


def cpus(sys: Path = SYS) -> tuple[CpuFact, ...]:
    """The online CPUs that this process may use."""
    node_of = {cpu: node for node in _node_ids(sys) for cpu in cpu_list(text(_node(sys, node) / "cpulist"))}
    online = cpu_list(text(sys / "devices/system/cpu/online")) or tuple(range(os.cpu_count() or 1))
    allowed = os.sched_getaffinity(0)
    facts = []
    for cpu in online:
        if cpu not in allowed:
            continue
        topology = sys / f"devices/system/cpu/cpu{cpu}/topology"
        facts.append(
            CpuFact(
                id=cpu,
                core_id=number(topology / "core_id") or 0,
                socket_id=max(number(topology / "physical_package_id") or 0, 0),
                numa_node=node_of.get(cpu, 0),
                siblings=cpu_list(text(topology / "thread_siblings_list")) or (cpu,),
            )
        )
    return tuple(facts)


def numa_nodes(sys: Path = SYS) -> tuple[NumaNodeFact, ...]:
    nodes = []
    for node in _node_ids(sys):
        pages = {size: _node(sys, node) / f"hugepages/hugepages-{size}kB" for size in (2048, 1_048_576)}
        nodes.append(
            NumaNodeFact(
                id=node,
                memory_bytes=_node_memory(sys, node),
                hugepages_2m_total=number(pages[2048] / "nr_hugepages") or 0,
                hugepages_2m_free=number(pages[2048] / "free_hugepages") or 0,
                hugepages_1g_total=number(pages[1_048_576] / "nr_hugepages") or 0,
                hugepages_1g_free=number(pages[1_048_576] / "free_hugepages") or 0,
            )
        )
    return tuple(nodes) or (NumaNodeFact(id=0, memory_bytes=memory()["MemTotal"]),)


def memory(proc: Path = PROC) -> dict[str, int]:
    """/proc/meminfo in bytes; MemTotal and SwapTotal are always there."""
    values = {"MemTotal": 0, "SwapTotal": 0}
    for line in text(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        amount = rest.split()
        if amount and amount[0].isdigit():
            values[name] = int(amount[0]) * (1024 if amount[-1] == "kB" else 1)
    return values


def disks(sys: Path = SYS, proc: Path = PROC) -> tuple[DiskFact, ...]:
    mounted = {line.split()[0].removeprefix("/dev/") for line in text(proc / "self/mounts").splitlines() if line.split()}
    facts = []
    for entry in entries(sys / "block"):
        sectors = number(entry / "size")
        if entry.name.startswith(_VIRTUAL_DISKS) or not sectors:
            continue
        names = {entry.name, *(part.name for part in entries(entry) if part.name.startswith(entry.name))}
        facts.append(
            DiskFact(
                name=entry.name,
                size_bytes=sectors * _SECTOR_BYTES,
                is_rotational=number(entry / "queue/rotational") == 1,
                model=text(entry / "device/model"),
                is_mounted=bool(names & mounted),
            )
        )
    return tuple(facts)


def pci(sys: Path = SYS) -> tuple[PciFact, ...]:
    facts = []
    for entry in entries(sys / "bus/pci/devices"):
        node, group, driver = number(entry / "numa_node"), entry / "iommu_group", entry / "driver"
        facts.append(
            PciFact(
                bdf=entry.name,
                class_id=text(entry / "class").removeprefix("0x"),
                vendor_id=text(entry / "vendor").removeprefix("0x"),
                device_id=text(entry / "device").removeprefix("0x"),
                numa_node=node if node is not None and node >= 0 else None,
                iommu_group=int(group.resolve().name) if group.exists() and group.resolve().name.isdigit() else None,
                driver=driver.resolve().name if driver.exists() else "",
            )
        )
    return tuple(facts)


def _node_ids(sys: Path) -> tuple[int, ...]:
    return cpu_list(text(sys / "devices/system/node/online"))


def _node(sys: Path, node: int) -> Path:
    return sys / f"devices/system/node/node{node}"


def _node_memory(sys: Path, node: int) -> int:
    for line in text(_node(sys, node) / "meminfo").splitlines():
        words = line.split()
        if "MemTotal:" in words and words[-2].isdigit():
            return int(words[-2]) * 1024
    return 0
