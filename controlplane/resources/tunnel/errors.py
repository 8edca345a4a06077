"""What can go wrong with tunnels."""

from __future__ import annotations

from controlplane.core.errors import Conflict


class TunnelsRotating(Conflict):
    """Keys are being rotated; another rotation can begin when this one has ended."""

    code = "tunnel.rotating"
    title = "Keys are being rotated"
