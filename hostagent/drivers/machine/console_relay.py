"""Between a VMM's serial socket and people: everything goes to the machine's log, and to whoever looks on.

The one rule: the VMM serves one client and forgets what nobody reads, so this process is that client as long as the machine
runs, also while the agent is away. One who looks on and reads too slowly is cut off.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import time
from pathlib import Path

PATIENCE_SECONDS = 60.0
PAUSE_SECONDS = 0.1
MOST_CLIENTS = 8
READ_BYTES = 65_536


def main(serial_path: Path, console_path: Path, log_path: Path, uid: int) -> None:
    """Becomes the machine's user first: only root can be sure to reach the interpreter and the agent's code. Ends when
    the serial socket has been away for PATIENCE_SECONDS: a guest that reboots brings it back at once.
    """
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    console_path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(console_path))
        console_path.chmod(0o600)
        listener.listen(MOST_CLIENTS)
        log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        relay = Relay(listener, log)
        while (serial := _connected(serial_path)) is not None:
            with serial:
                relay.serve(serial)


class Relay:
    """Clients stay while the serial socket changes."""

    def __init__(self, listener: socket.socket, log: int) -> None:
        self.listener = listener
        self.log = log
        self.clients: set[socket.socket] = set()

    def serve(self, serial: socket.socket) -> None:
        """Until the VMM closes its end."""
        with selectors.DefaultSelector() as selector:
            for known in (serial, self.listener, *self.clients):
                selector.register(known, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self.listener:
                        self._welcome(selector)
                    elif key.fileobj is serial:
                        if not self._tell(serial, selector):
                            return
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self.clients:
                        self._hear(key.fileobj, serial, selector)

    def _welcome(self, selector: selectors.BaseSelector) -> None:
        client, _ = self.listener.accept()
        if len(self.clients) >= MOST_CLIENTS:
            client.close()
            return
        client.setblocking(False)
        self.clients.add(client)
        selector.register(client, selectors.EVENT_READ)

    def _tell(self, serial: socket.socket, selector: selectors.BaseSelector) -> bool:
        with contextlib.suppress(OSError):
            if said := serial.recv(READ_BYTES):
                os.write(self.log, said)
                for client in tuple(self.clients):
                    try:
                        client.sendall(said)
                    except OSError:
                        self._dismiss(client, selector)
                return True
        return False

    def _hear(self, client: socket.socket, serial: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            typed = client.recv(READ_BYTES)
        except OSError:
            typed = b""
        if not typed:
            self._dismiss(client, selector)
            return
        with contextlib.suppress(OSError):
            serial.sendall(typed)

    def _dismiss(self, client: socket.socket, selector: selectors.BaseSelector) -> None:
        selector.unregister(client)
        self.clients.discard(client)
        client.close()


def _connected(path: Path) -> socket.socket | None:
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        serial = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            serial.connect(str(path))
        except OSError:
            serial.close()
            time.sleep(PAUSE_SECONDS)
        else:
            return serial
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
