"""What a lab is made of, as data; and its record on disk, from which `clean` works when the creator is dead.

The one rule: an intent is written to the record before the thing is made, so that a creator killed at any moment leaves
nothing that `clean` cannot find.
"""

from __future__ import annotations

import ipaddress
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

RECORD = "lab.json"
FIRST_HOST_NUMBER = 11


class LabError(RuntimeError):
    """A lab could not be made or reached; the text says which step failed and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """What a host should be. `cores` and `memory_bytes` are its declared share of this machine.

    `network`: a compute or edge host has a network namespace of its own; a gateway lives in the machine's.
    """

    name: str
    kind: Literal["host", "gateway"] = "host"
    cores: int = 1
    memory_bytes: int = 2 << 30


@dataclass(slots=True, kw_only=True)
class HostRecord:
    """A host as made. `pid`/`start_ticks` tell its pid 1 as the machine sees it; 0 = not running."""

    name: str
    kind: str
    number: int
    cores: int
    memory_bytes: int
    address: str
    address_ipv6: str
    ssh_address: str
    ssh_port: int
    pid: int = 0
    start_ticks: int = 0
    boots: int = 0


@dataclass(slots=True, kw_only=True)
class LabRecord:
    id: str
    name: str
    ipv4: str
    ipv6: str
    cgroups: list[str] = field(default_factory=list)
    sysctls: dict[str, str] = field(default_factory=dict)
    hosts: list[HostRecord] = field(default_factory=list)

    @property
    def link(self) -> str:
        """The one link in the machine's own namespace."""
        return f"bl{self.id}"

    @property
    def network_ipv4(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(self.ipv4)

    @property
    def network_ipv6(self) -> ipaddress.IPv6Network:
        return ipaddress.IPv6Network(self.ipv6)

    def host(self, name: str) -> HostRecord:
        for host in self.hosts:
            if host.name == name:
                return host
        raise LabError(f"the lab {self.name} has no host {name}")


def write_record(directory: Path, record: LabRecord) -> None:
    """Atomically and durably."""
    temporary = directory / f"{RECORD}.new"
    with temporary.open("w") as stream:
        json.dump(asdict(record), stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(directory / RECORD)


def read_record(directory: Path) -> LabRecord | None:
    try:
        data = json.loads((directory / RECORD).read_text())
    except FileNotFoundError:
        return None
    hosts = [HostRecord(**host) for host in data.pop("hosts")]
    return LabRecord(**data, hosts=hosts)
