"""Which drivers a host has, and what of a machine it cannot limit: that is said, never silently dropped."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostagent.drivers.registry import host_drivers
from hostagent.lib.hostconfig import HostConfig
from hostagent.lib.paths import Paths


@pytest.mark.caps("qemu")
async def test_what_cannot_be_limited_is_said(tmp_path: Path):
    plain = await host_drivers(Paths.under(tmp_path), HostConfig(supervisor="plain", machine_drivers=("qemu",)))
    assert set(plain.machines) == {"qemu"}
    assert plain.unlimited == ("qemu:cpu", "qemu:memory")
    systemd = await host_drivers(Paths.under(tmp_path), HostConfig(supervisor="systemd", machine_drivers=("qemu",)))
    assert systemd.unlimited == ()
