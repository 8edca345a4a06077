"""A real sshd on a port of its own, whose only key has the agent's forced command."""

from __future__ import annotations

import asyncio
import getpass
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import asyncssh

from controlplane.remote.access import Access

DEADLINE_SECONDS = 30.0
REPOSITORY = Path(__file__).parents[2]


class Sshd:
    def __init__(self, directory: Path, root: Path) -> None:
        self.directory = directory
        self.process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.key = asyncssh.generate_private_key("ssh-ed25519")
        self.host_key = asyncssh.generate_private_key("ssh-ed25519")
        self.host_key.write_private_key(directory / "host_key")
        (directory / "host_key").chmod(0o600)
        command = f"PYTHONPATH={REPOSITORY} {sys.executable} -m hostagent dispatch --root {root}"
        public = self.key.export_public_key().decode().strip()
        (directory / "authorized_keys").write_text(f'restrict,command="{command}" {public}\n')
        lines = [
            f"Port {self.port}", "ListenAddress 127.0.0.1", f"HostKey {directory / 'host_key'}", "UsePAM no", "StrictModes no",
            f"AuthorizedKeysFile {directory / 'authorized_keys'}", "PidFile none", "PermitRootLogin yes", "UseDNS no",
        ]  # fmt: skip
        (directory / "config").write_text("\n".join(lines) + "\n")

    async def start(self, log: Path = Path(os.devnull)) -> None:
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        program = shutil.which("sshd", path="/usr/sbin:/usr/bin")
        assert program is not None
        with log.open("ab") as words:
            self.process = subprocess.Popen([program, "-D", "-e", "-f", str(self.directory / "config")], stderr=words)
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                except OSError:
                    await asyncio.sleep(0.02)
                else:
                    writer.close()
                    return

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    @property
    def access(self) -> Access:
        return Access(
            address="127.0.0.1",
            port=self.port,
            fingerprint=self.host_key.get_fingerprint(),
            private_key=self.key.export_private_key(),
            user=getpass.getuser(),
        )
