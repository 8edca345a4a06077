"""The names of the verbs and the types of their bodies.

| verb | body | answer body |
|---|---|---|
| `facts.observe` | {} | facts.HostFacts |
| `host.observe` | {} | {"objects": [Observed…], "boot_id", "agent_version"} |
| `image/volume/nic/network/vm.ensure` | the wanted document | results.Outcome |
| `image/volume/nic/network/vm.purge` | wanted.Purge | results.Outcome |
| `image/volume/nic/network/vm.observe` | {"id"} | {"object": Observed or null} |
| `stream.open` | StreamRequest | {"ticket"}: valid once, for 60 s, as SSH command `stream <ticket>` |
| `events.subscribe` | {"log", "seq"} | {"log", "seq"}; then Event frames follow on this channel |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hostagent.protocol import wanted

ENSURE: dict[str, type] = {
    "image.ensure": wanted.ImageWanted,
    "volume.ensure": wanted.VolumeWanted,
    "nic.ensure": wanted.NicWanted,
    "network.ensure": wanted.NetworkWanted,
    "vm.ensure": wanted.VmWanted,
}
PURGE = tuple(name.replace(".ensure", ".purge") for name in ENSURE)
OBSERVE = tuple(name.replace(".ensure", ".observe") for name in ENSURE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRequest:
    """`console` and `log` name a VM; `tcp` a VM and a port on its address; `upload` a file by digest, from `offset`.

    An upload stream carries raw bytes from `offset` to `size_bytes`; the agent verifies the sha256 before the file
    gets its name, and answers `stream.open` with the offset it already has, so that a cut upload goes on.
    """

    kind: Literal["console", "log", "tcp", "upload"]
    id: str = ""
    port: int = 0
    sha256: str = ""
    size_bytes: int = 0
    offset: int = 0
    follow: bool = False
