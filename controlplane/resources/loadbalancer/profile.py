"""Named timeouts: how long edge hosts remember a silent flow. The one rule: names are for ever, seconds may change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """0 keeps the kernel's own (TCP: five days; UDP: 30 s, of a stream 120 s)."""

    established_timeout_seconds: int = 0
    udp_timeout_seconds: int = 0


PROFILES = {
    "default": Profile(established_timeout_seconds=3600, udp_timeout_seconds=60),
    "web": Profile(established_timeout_seconds=600, udp_timeout_seconds=30),
    "grpc": Profile(established_timeout_seconds=5, udp_timeout_seconds=30),
    "stream": Profile(established_timeout_seconds=6 * 3600, udp_timeout_seconds=600),
    "dns": Profile(established_timeout_seconds=60, udp_timeout_seconds=10),
}
