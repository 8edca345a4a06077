"""What flows in the flowtable carry: no rule sees it, their conntrack entries count it.

The one rule: an entry outlives its flow (a closed connection's by at least ten seconds), so looking every two seconds sees all
but the last of what is deleted while it runs. What a flow carried before it was long has been counted by the rules.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial

from hostagent.drivers.network.balancer_kernel import Carried, marked_flows
from hostagent.drivers.network.balancer_rules import OFFLOADED, OFFLOADED_FROM_BYTES
from hostagent.drivers.network.protocol import FlowDriver
from hostagent.drivers.network.table import MARK_BACKEND_MASK
from hostagent.lib.wait import until

LOOK_SECONDS = 2.0
GONE_SECONDS = 5.0
LEAST_REST = 20  # looking may take a twentieth of the time: a table of a million flows is walked by the kernel each time


class LongFlows:
    """`sums`: by set name and mark (packets, bytes), to be added to what the rules counted."""

    def __init__(self) -> None:
        self.sums: dict[str, dict[int, tuple[int, int]]] = {"lb_in": {}, "lb_out": {}}
        self._seen: dict[bytes, Carried] = {}
        self._next_look = 0.0

    def look(self, *, is_asked: bool = False) -> None:
        """Read the kernel when it is time to, or `is_asked`. Blocks."""
        began = time.monotonic()
        if began < self._next_look and not is_asked:
            return
        self.count(marked_flows(OFFLOADED))
        self._next_look = began + max(LOOK_SECONDS, LEAST_REST * (time.monotonic() - began))

    def count(self, flows: Iterable[tuple[bytes, int, Carried]]) -> None:
        """Add what these carried since they were last seen, and forget those that are not there any more."""
        seen: dict[bytes, Carried] = {}
        for name, mark, now in flows:
            before = self._seen.get(name)
            if before is None or before.in_packets > now.in_packets or before.out_packets > now.out_packets:
                before = counted_by_rules(now)
            self._add("lb_in", mark & ~OFFLOADED, now.in_packets - before.in_packets, now.in_bytes - before.in_bytes)
            self._add("lb_out", mark & ~OFFLOADED, now.out_packets - before.out_packets, now.out_bytes - before.out_bytes)
            seen[name] = now
        self._seen = seen

    def keep(self, marks: Mapping[int, object]) -> None:
        """Forget marks that belong to nobody any more."""
        self.sums = {name: {mark: sums[mark] for mark in sums if mark in marks} for name, sums in self.sums.items()}

    def _add(self, name: str, mark: int, packets: int, size: int) -> None:
        have = self.sums[name].get(mark, (0, 0))
        self.sums[name][mark] = (have[0] + packets, have[1] + size)


class Offload:
    """Ends flows that are in the flowtable. `pause(True)` takes it away, with every flow in it back to the rules.

    Kernels before 6.4 do not delete the conntrack entry of such a flow (net/netfilter/nf_conntrack_netlink.c, IPS_OFFLOAD).
    """

    def __init__(self, flows: FlowDriver, pause: Callable[[bool], Awaitable[None]]) -> None:
        self._flows = flows
        self._pause = pause
        self._lock = asyncio.Lock()

    async def forget(self, mark: int) -> None:
        """What the kernel has kept of the flows with this mark; all others go on, and are offloaded again."""
        async with self._lock:
            if await self._is_gone(mark):
                return
            await self._pause(True)
            try:
                await until(partial(self._is_gone, mark), seconds=GONE_SECONDS)
            finally:
                await self._pause(False)

    async def _is_gone(self, mark: int) -> bool:
        await self._flows.delete_marked(mark, MARK_BACKEND_MASK)
        return not await self._flows.flows(mark=mark, mask=MARK_BACKEND_MASK)


def counted_by_rules(now: Carried) -> Carried:
    """An estimate: the first quarter megabyte had its directions in the proportion of all that there is now."""
    share = min(1.0, OFFLOADED_FROM_BYTES / max(1, now.in_bytes + now.out_bytes))
    return Carried(*(round(share * number) for number in (now.in_packets, now.in_bytes, now.out_packets, now.out_bytes)))
