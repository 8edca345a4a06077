"""A real ACME authority on loopback: Debian's `pebble` with its DNS server. It refuses a third of all good nonces."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from controlplane.cli.certificates import Authority
from controlplane.settings import AcmeSettings

PATIENCE_SECONDS = 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Pebble:
    """`challenge_port` is where it looks for http-01 answers of every name; names lead to 127.0.0.1 unless told."""

    directory: Path
    challenge_port: int = field(default_factory=free_port)
    port: int = field(default_factory=free_port)
    management_port: int = field(default_factory=free_port)
    dns_port: int = field(default_factory=free_port)
    dns_management_port: int = field(default_factory=free_port)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def ca_file(self) -> Path:
        return self.directory / "listener-ca.pem"

    def acme(self, *domains: str, **more: object) -> AcmeSettings:
        values = {
            "directory_url": f"https://localhost:{self.port}/dir",
            "email": "operator@bedplate.test",
            "terms_agreed": True,
            "challenge_listen": f"127.0.0.1:{self.challenge_port}",
            "ca_file": self.ca_file,
        }
        return AcmeSettings.model_validate({**values, "domains": domains, **more})

    def environment(self, *domains: str) -> dict[str, str]:
        acme = self.acme(*domains)
        values = {
            "DOMAINS": ",".join(domains),
            "DIRECTORY_URL": acme.directory_url,
            "EMAIL": acme.email,
            "TERMS_AGREED": "true",
            "CHALLENGE_LISTEN": acme.challenge_listen,
            "CA_FILE": str(acme.ca_file),
        }
        return {f"BEDPLATE_TLS__ACME__{name}": value for name, value in values.items()}

    def trusted(self) -> ssl.SSLContext:
        """Trusts what it issues; its root is another one after each start."""
        context = ssl.create_default_context(cafile=str(self.ca_file))
        with urllib.request.urlopen(f"https://localhost:{self.management_port}/roots/0", context=context, timeout=5) as answer:
            return ssl.create_default_context(cadata=answer.read().decode())

    def point(self, name: str, address: str) -> None:
        """Have a name lead elsewhere."""
        for path, body in (("clear-a", {"host": f"{name}."}), ("add-a", {"host": f"{name}.", "addresses": [address]})):
            url = f"http://127.0.0.1:{self.dns_management_port}/{path}"
            request = urllib.request.Request(url, data=json.dumps(body).encode(), method="POST")
            urllib.request.urlopen(request, timeout=5).close()

    def start(self) -> None:
        names = Authority.make("listener")
        issued = names.issue(["localhost", "127.0.0.1"])
        for path, content in (
            (self.ca_file, names.certificate_pem),
            (self.directory / "listener.pem", issued.certificate_pem),
            (self.directory / "listener.key", issued.key_pem),
        ):
            path.write_bytes(content)
        configuration = {
            "listenAddress": f"127.0.0.1:{self.port}",
            "managementListenAddress": f"127.0.0.1:{self.management_port}",
            "certificate": str(self.directory / "listener.pem"),
            "privateKey": str(self.directory / "listener.key"),
            "httpPort": self.challenge_port,
            "tlsPort": free_port(),
        }
        (self.directory / "pebble.json").write_text(json.dumps({"pebble": configuration}))
        dns = f"127.0.0.1:{self.dns_port}"
        off = [word for name in ("-http01", "-https01", "-tlsalpn01", "-defaultIPv6") for word in (name, "")]
        self._run("pebble-challtestsrv", "-dns01", dns, "-management", f"127.0.0.1:{self.dns_management_port}", *off)
        self._run("pebble", "-config", str(self.directory / "pebble.json"), "-dnsserver", dns)
        for port in (self.dns_management_port, self.management_port, self.port):
            self._wait(port)

    def _run(self, *argv: str) -> None:
        environment = {**os.environ, "PEBBLE_VA_NOSLEEP": "1", "PEBBLE_WFE_NONCEREJECT": "30", "PEBBLE_AUTHZREUSE": "0"}
        with (self.directory / f"{argv[0]}.log").open("ab") as log:
            self.processes.append(subprocess.Popen(argv, env=environment, stdout=log, stderr=log, cwd=self.directory))

    def _wait(self, port: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            assert time.monotonic() < deadline, (self.directory / "pebble.log").read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes.clear()


@contextlib.contextmanager
def running(directory: Path) -> Iterator[Pebble]:
    pebble = Pebble(directory=directory)
    try:
        pebble.start()
        yield pebble
    finally:
        pebble.stop()
