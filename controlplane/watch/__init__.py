"""Holds the hosts' event channels and relays streams. It decides nothing: what it hears becomes signals."""
