"""Emulated bare-metal hosts: machines with firmware, systemd, an IOMMU, PCI devices and nested KVM. Needs root."""

from provisioning.lab.metal.host import MetalHost
from provisioning.lab.metal.image import build, find
from provisioning.lab.metal.machine import MetalSpec
from provisioning.lab.metal.recipe import Recipe

__all__ = ["MetalHost", "MetalSpec", "Recipe", "build", "find"]
