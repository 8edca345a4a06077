"""Pools of public addresses: prefixes that the operator has, and from which projects reserve."""
