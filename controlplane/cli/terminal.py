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

from controlplane.cli.errors import CommandFailed, Exit
from controlplane.cli.output import say

_LEAVE = b"\x1d"  # Ctrl-]
_CHUNK_BYTES = 65_536
_RIGHT_ENDED = frozenset({4401, 4403})  # close codes of the API


def relay(socket: Any, *, is_terminal: bool = False) -> None:
    """Bytes both ways until the other side ends; with `is_terminal` also until Ctrl-]."""
    from websockets.exceptions import ConnectionClosed

    is_raw = is_terminal and sys.stdin.isatty()
    if is_raw:
        say("connected; Ctrl-] leaves")
    with socket, _raw() if is_raw else contextlib.nullcontext():
        threading.Thread(target=_outward, args=(socket, is_raw), daemon=True).start()
        try:
            for message in socket:
                os.write(sys.stdout.fileno(), message if isinstance(message, bytes) else message.encode())
        except ConnectionClosed as closed:
            _tell_refusal(closed)


def _tell_refusal(closed: Any) -> None:
    """Raises CommandFailed when the stream was ended because the right to it did."""
    code, reason = (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd is not None else (0, "")
    if code in _RIGHT_ENDED:
        raise CommandFailed("the right to this stream has ended", exit_code=Exit.NOT_ALLOWED, code=reason)


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
