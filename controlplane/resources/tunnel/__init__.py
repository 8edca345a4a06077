"""Tunnels between hosts: who is in the mesh, and whose turn it is among the keys. The hosts are told by `network`."""
