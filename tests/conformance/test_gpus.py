"""Every GPU driver hands a device over and gives it back. The one rule: absent and given back already are success."""

from __future__ import annotations

import pytest

from hostagent.drivers.gpu.fake import FakeGpu
from hostagent.drivers.gpu.protocol import GpuDriver, GpuPlan

BDF = "0000:65:00.0"
PLAN = GpuPlan(bdf=BDF, group_bdfs=(BDF, "0000:65:00.1"), uid=1000, gid=1000)


@pytest.fixture(params=["fake"])
def gpu(request: pytest.FixtureRequest) -> GpuDriver:
    return {"fake": FakeGpu}[request.param]((BDF,))


async def test_a_device_that_is_not_there_is_absent(gpu: GpuDriver):
    assert await gpu.observe("0000:ff:00.0") is None
    await gpu.remove("0000:ff:00.0")


async def test_a_device_is_handed_over_and_given_back(gpu: GpuDriver):
    before = await gpu.observe(BDF)
    assert before is not None
    assert before.state == "with_host"
    for _ in range(2):
        assert (await gpu.apply(PLAN)).state == "handed_over"
    for _ in range(2):
        await gpu.remove(BDF)
        after = await gpu.observe(BDF)
        assert after is not None
        assert after.state == "with_host"


def test_rendering_is_pure_and_names_the_whole_group(gpu: GpuDriver):
    assert gpu.render(PLAN) == gpu.render(PLAN)
    text = str(gpu.render(PLAN))
    assert all(bdf in text for bdf in PLAN.group_bdfs)
