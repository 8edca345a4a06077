"""The emulated server is one: its devices can be given away, and it is found by whoever did not make it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from provisioning.lab.metal import MetalHost

pytestmark = [pytest.mark.metal, pytest.mark.timeout(300), pytest.mark.caps("root", "qemu", "debootstrap")]
BIND = """
set -e
cd /sys/bus/pci/devices
modprobe vfio-pci
for device in *; do
  case $(cat $device/vendor):$(cat $device/device) in 0x1234:0x11e8|0x1b36:0x0005|0x8086:0x10d3) ;; *) continue ;; esac
  group=$(basename $(readlink $device/iommu_group))
  test $(ls $device/iommu_group/devices | wc -l) = 1
  echo vfio-pci > $device/driver_override
  echo $device > /sys/bus/pci/drivers_probe
  test $(basename $(readlink $device/driver)) = vfio-pci
  test -c /dev/vfio/$group
  echo > $device/driver_override
  echo $device > /sys/bus/pci/drivers/vfio-pci/unbind
  test ! -e $device/driver
  echo released $device
done
"""


def test_every_accelerator_is_alone_in_its_group_and_can_be_bound_and_released(metal: MetalHost) -> None:
    assert metal.exec(["sh", "-c", BIND]).stdout.count(b"released") == 3


def test_another_process_finds_it(metal: MetalHost) -> None:
    argv = [sys.executable, "-m", "provisioning.lab.metal", "--directory", str(metal.directory)]
    done = subprocess.run([*argv, "show"], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [metal.name, "running", f"root@{metal.address}"]
    done = subprocess.run([*argv, "ssh", "cat", "/etc/hostname"], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == metal.name
