"""The forced command of the control plane's SSH key: bytes between SSH and the service's socket, nothing else.

The one rule: SSH_ORIGINAL_COMMAND is compared, never executed. It is exactly `rpc`, or `stream` and a ticket of 32 hex
digits; anything else is refused with exit code 2. Imports stay few: this starts once for every channel.
"""

from __future__ import annotations

import os
import re
import select
import socket
import sys

COMMAND = re.compile(rb"rpc|stream ([0-9a-f]{32})")
EXIT_REFUSED = 2
EXIT_AGENT_AWAY = 69
CHUNK_BYTES = 1 << 18


def main(socket_path: str, environment: dict[bytes, bytes] | None = None) -> int:
    command = (os.environb if environment is None else environment).get(b"SSH_ORIGINAL_COMMAND", b"")
    matched = COMMAND.fullmatch(command)
    if matched is None:
        sys.stderr.write("refused: this key speaks the agent's protocol only\n")
        return EXIT_REFUSED
    hello = b'{"face":"rpc"}\n' if matched[1] is None else b'{"face":"stream","ticket":"' + matched[1] + b'"}\n'
    service = socket.socket(socket.AF_UNIX)
    try:
        service.connect(socket_path)
    except OSError as error:
        sys.stderr.write(f"the agent is not running: {error.strerror}\n")
        return EXIT_AGENT_AWAY
    with service:
        service.sendall(hello)
        pump(sys.stdin.fileno(), sys.stdout.fileno(), service)
    return 0


def pump(source: int, sink: int, service: socket.socket) -> None:
    """Both directions until the service closes; at most one chunk is held each way, so SSH's window is the back-pressure."""
    service.setblocking(False)
    os.set_blocking(source, False)
    os.set_blocking(sink, False)
    upward, downward = b"", b""
    is_source_open, is_service_open = True, True
    while is_service_open or downward:
        poll = select.poll()
        wanted: dict[int, int] = {}
        if is_source_open and not upward:
            wanted[source] = select.POLLIN
        if downward:
            wanted[sink] = wanted.get(sink, 0) | select.POLLOUT
        if is_service_open:
            wanted[service.fileno()] = (0 if downward else select.POLLIN) | (select.POLLOUT if upward else 0)
        if sink not in wanted:
            wanted[sink] = 0  # a closed SSH channel shows as POLLERR
        for descriptor, mask in wanted.items():
            poll.register(descriptor, mask)
        for descriptor, events in poll.poll():
            if descriptor == sink and events & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
                return
            if descriptor == source and not upward and is_source_open:
                upward = _read(source)
                if upward == b"":
                    is_source_open = False
                    _end_writing(service)
            elif descriptor == service.fileno():
                if events & select.POLLOUT and upward:
                    upward, is_service_open = _send(service, upward)
                if events & (select.POLLIN | select.POLLHUP | select.POLLERR) and not downward:
                    received = _receive(service)
                    is_service_open = received != b"" and is_service_open
                    downward = received or b""
            if descriptor == sink and events & select.POLLOUT and downward:
                downward = downward[_write(sink, downward) :]


def _read(descriptor: int) -> bytes | None:
    """b"" at the end, None when there is nothing now."""
    try:
        return os.read(descriptor, CHUNK_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _receive(service: socket.socket) -> bytes | None:
    try:
        return service.recv(CHUNK_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _send(service: socket.socket, data: bytes) -> tuple[bytes, bool]:
    """What is left, and whether the service still listens."""
    try:
        return data[service.send(data) :], True
    except BlockingIOError:
        return data, True
    except OSError:
        return b"", False


def _write(descriptor: int, data: bytes) -> int:
    try:
        return os.write(descriptor, data)
    except BlockingIOError:
        return 0


def _end_writing(service: socket.socket) -> None:
    try:
        service.shutdown(socket.SHUT_WR)
    except OSError:
        return
