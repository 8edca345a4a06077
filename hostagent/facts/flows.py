"""How full the kernel's table of flows is. The one rule: a full table refuses new flows in silence, so it is told before.

Source: Linux, Documentation/networking/nf_conntrack-sysctl.rst; net/netfilter/nf_conntrack_standalone.c (ct_cpu_seq_show).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hostagent.facts.sysfs import PROC, number, text

NEARLY_FULL = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowTable:
    """`limit` 0: the kernel has none. `refused`: packets of new flows dropped because it was full, `evicted`: flows without an
    answer that made room for others; both since the boot.
    """

    count: int = 0
    limit: int = 0
    refused: int = 0
    evicted: int = 0

    @property
    def is_nearly_full(self) -> bool:
        return self.count >= NEARLY_FULL * self.limit > 0


def flow_table(proc: Path = PROC) -> FlowTable:
    counted = _columns(text(proc / "net/stat/nf_conntrack"))
    return FlowTable(
        count=number(proc / "sys/net/netfilter/nf_conntrack_count") or 0,
        limit=number(proc / "sys/net/netfilter/nf_conntrack_max") or 0,
        refused=counted.get("drop", 0),
        evicted=counted.get("early_drop", 0),
    )


def _columns(table: str) -> dict[str, int]:
    """The sum of each column over all processors; a column without a number is 0."""
    head, *lines = table.split("\n")
    sums = dict.fromkeys(head.split(), 0)
    for line in lines:
        for name, value in zip(head.split(), line.split(), strict=False):
            sums[name] += int(value, 16) if all(digit in "0123456789abcdef" for digit in value) else 0
    return sums
