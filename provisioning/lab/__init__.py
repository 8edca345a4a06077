"""Hosts on one machine, made of namespaces: for tests, for the demo, for trying things out. Needs root."""

from provisioning.lab.lab import Lab, LabHost
from provisioning.lab.model import HostSpec, LabError

__all__ = ["HostSpec", "Lab", "LabError", "LabHost"]
