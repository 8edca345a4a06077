"""Firewalls: what machines let in and out. The tenant writes rules; hosts are told addresses, never names."""
