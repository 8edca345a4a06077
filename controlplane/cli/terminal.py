"""Between this terminal and a WebSocket. The one rule: the terminal is left as it was found, whatever happens."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from typing import Any

from controlplane.cli.output import say

_LEAVE = b"\x1d"  # Ctrl-]
_CHUNK_BYTES = 65_536


def relay(socket: Any, *, is_terminal: bool = False) -> None:
    """Bytes both ways until the other side ends; with `is_terminal` also until Ctrl-]."""
    from websockets.exceptions import ConnectionClosed

    is_raw = is_terminal and sys.stdin.isatty()
    if is_raw:
        say("connected; Ctrl-] leaves")
    with socket, _raw() if is_raw else contextlib.nullcontext():
        threading.Thread(target=_outward, args=(socket, is_raw), daemon=True).start()
        with contextlib.suppress(ConnectionClosed):
            for message in socket:
                os.write(sys.stdout.fileno(), message if isinstance(message, bytes) else message.encode())


def _outward(socket: Any, is_raw: bool) -> None:
    from websockets.exceptions import ConnectionClosed

    with contextlib.suppress(ConnectionClosed, OSError):
        while data := os.read(sys.stdin.fileno(), _CHUNK_BYTES):
            if is_raw and _LEAVE in data:
                break
            socket.send(data)
        if is_raw:
            socket.close()


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
