"""Network namespaces of tests and benchmarks: how a thread enters one, and gets one of its own.

The one rule: a socket, and a process, belong to the namespace in which they were made, wherever they are used from.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator

CLONE_NEWNET = 0x4000_0000
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def inside(place: str | int) -> Iterator[None]:
    """This thread, and what it starts, in a namespace: by its name, its path, or a descriptor of it."""
    there = place
    if isinstance(place, str):
        there = os.open(place if "/" in place else f"/run/netns/{place}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with _back_again():
            _enter(int(there))
            yield
    finally:
        if there != place:
            os.close(int(there))


@contextlib.contextmanager
def own() -> Iterator[None]:
    """This thread in a fresh namespace with a loopback; the machine's own is not touched."""
    with _back_again():
        _check(_libc.unshare(CLONE_NEWNET))
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=10)
        yield


@contextlib.contextmanager
def _back_again() -> Iterator[None]:
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        try:
            _enter(before)
        finally:
            os.close(before)


def _enter(descriptor: int) -> None:
    _check(_libc.setns(descriptor, CLONE_NEWNET))


def _check(answer: int) -> None:
    if answer != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
