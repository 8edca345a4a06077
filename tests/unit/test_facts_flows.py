"""How full the table of flows is, out of what the kernel writes."""

from __future__ import annotations

from pathlib import Path

from hostagent.facts.flows import FlowTable, flow_table

STATISTICS = """entries  clashres found new invalid insert_failed drop early_drop icmp_error
0000025f  00000000 00000000 00000000 00000008 00000000 0000000a 00000002 00000000
0000025f  00000000 00000000 00000000 00000008 00000000 00000001 00000000 00000000
"""


def test_figures_of_all_processors_are_added_up(tmp_path: Path) -> None:
    for path, words in (
        ("net/stat/nf_conntrack", STATISTICS),
        ("sys/net/netfilter/nf_conntrack_count", "800\n"),
        ("sys/net/netfilter/nf_conntrack_max", "1000\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(words)
    found = flow_table(tmp_path)
    assert found == FlowTable(count=800, limit=1000, refused=11, evicted=2)
    assert found.is_nearly_full


def test_a_kernel_without_one_has_none(tmp_path: Path) -> None:
    assert flow_table(tmp_path) == FlowTable()
    assert not flow_table(tmp_path).is_nearly_full
