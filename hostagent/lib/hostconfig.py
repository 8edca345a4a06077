"""What the operator (or the lab) declares of a host in /etc/bedplate/host.toml. The one rule: a declared share is a limit.

```toml
cpus = 2                       # cores given to machines; default: all online ones
memory_bytes = 4294967296      # memory given to machines; default: all
data_interface = "eth1"        # the trusted network between hosts
public_interface = "eth0"      # where reserved addresses are announced; default: the one that leads to them
bgp_local_as = 65010           # with bgp_peers: reserved addresses of BGP pools are told to routers
bgp_peers = ["192.0.2.1 65001"]  # address and AS number of each router
bgp_port = 179                 # another one where another BGP program listens
uid_base = 2013265920          # first numeric uid of machines; 65,536 for each
machine_drivers = ["qemu"]     # default: all that work here
unencrypted_volumes = false    # true: volumes may be made without encryption, for benchmarks
supervisor = "plain"           # default: systemd where PID 1 is systemd
```
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

_PEER = re.compile(r"[0-9a-fA-F.:]{3,45} [1-9][0-9]{0,9}")
# Above systemd's container range (0x6fffffff) and below 2^31, where some programs still see a sign.
DEFAULT_UID_BASE = 0x7800_0000
UIDS_PER_MACHINE = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """`unknown`: keys nobody understands; they become a condition of the host, never an error that keeps it down."""

    cpus: int | None = None
    memory_bytes: int | None = None
    data_interface: str = ""
    public_interface: str = ""
    bgp_local_as: int | None = None
    bgp_peers: tuple[str, ...] = ()
    bgp_port: int = 179
    uid_base: int = DEFAULT_UID_BASE
    machine_drivers: tuple[str, ...] = ()
    supervisor: str = ""
    drivers: str = ""
    unencrypted_volumes: bool = False
    unknown: tuple[str, ...] = ()


def load(path: Path) -> HostConfig:
    """Defaults when there is no file. What cannot be read counts as unknown and is named there."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return HostConfig()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        return HostConfig(unknown=(f"{path}: {error}",))
    return _from(values)


def _from(values: dict[str, Any]) -> HostConfig:
    known: dict[str, Any] = {}
    unknown: list[str] = []
    names = {field.name for field in fields(HostConfig)} - {"unknown"}
    for name, value in values.items():
        if name not in names or not _fits(name, value):
            unknown.append(name)
        else:
            known[name] = tuple(value) if isinstance(value, list) else value
    return HostConfig(**known, unknown=tuple(unknown))


def _fits(name: str, value: object) -> bool:
    if name in ("cpus", "memory_bytes", "uid_base", "bgp_local_as", "bgp_port"):
        return type(value) is int and value > 0
    if name == "unencrypted_volumes":
        return isinstance(value, bool)
    if name == "bgp_peers":
        return isinstance(value, list) and all(isinstance(item, str) and _PEER.fullmatch(item) for item in value)
    if name == "machine_drivers":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return isinstance(value, str)
