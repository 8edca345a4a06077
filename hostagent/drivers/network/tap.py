"""Taps by ioctl: made persistent by the agent, opened again by it for each start of a VMM, which gets only the descriptor.

The one rule: a VMM never opens /dev/net/tun, so it needs no right on it and cannot make an interface.
Source: Linux, Documentation/networking/tuntap.rst and include/uapi/linux/if_tun.h.
"""

from __future__ import annotations

import fcntl
import os
import struct

TUN = "/dev/net/tun"
TUNSETIFF = 0x400454CA
TUNSETPERSIST = 0x400454CB
TUNSETOWNER = 0x400454CC
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000
IFF_VNET_HDR = 0x4000
IFF_MULTI_QUEUE = 0x0100


def open_tap(interface: str, *, is_multi_queue: bool = False) -> int:
    """A descriptor of this tap (one queue), which is made when absent. The caller closes it. Raises OSError."""
    flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR | (IFF_MULTI_QUEUE if is_multi_queue else 0)
    descriptor = os.open(TUN, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", interface.encode(), flags))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def make_tap(interface: str, *, uid: int, is_multi_queue: bool = False) -> None:
    """A persistent tap that belongs to `uid`. Made already is success. Raises OSError."""
    descriptor = open_tap(interface, is_multi_queue=is_multi_queue)
    try:
        fcntl.ioctl(descriptor, TUNSETOWNER, uid)
        fcntl.ioctl(descriptor, TUNSETPERSIST, 1)
    finally:
        os.close(descriptor)
