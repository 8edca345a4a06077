"""A host that is away for days is still asked at a bounded pace."""

from __future__ import annotations

import asyncio

import pytest

from controlplane.remote.link import HostUnreachable
from controlplane.remote.ssh import LONGEST_DELAY_SECONDS, _Host


class Nowhere:
    async def access(self, host_id: str):
        raise HostUnreachable(host_id, "away")


async def test_the_back_off_holds_after_thousands_of_failures():
    host = _Host("h", Nowhere())
    host._failures = 5000
    failures: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    with pytest.raises(HostUnreachable):
        await host.rpc()
    await asyncio.sleep(0)
    assert not failures
    assert 0 < host._not_before - asyncio.get_running_loop().time() <= LONGEST_DELAY_SECONDS
    with pytest.raises(HostUnreachable, match="away"):
        await host.rpc()
    assert host._failures == 5001, "not tried again before its time"
