"""Disks. Now: the root disk that is made and goes with its machine."""
