"""Whether KVM is usable. The one rule: only a guest that booted with it proves it; the answer is kept for this boot."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from hostagent.lib import files
from hostagent.protocol import codec
from hostagent.protocol.facts import KvmFact

DEVICE = Path("/dev/kvm")
_NOT_YET = (  # reasons that may be gone the next time somebody asks; the device comes with its module, which udev loads
    *("no kernel", "not installed", "not probed", "does not exist"),
)

Probe = Callable[[], Awaitable[KvmFact]]


async def cached(path: Path, boot_id: str, probe: Probe) -> KvmFact:
    """The answer of this boot, probed when there is none yet."""
    try:
        kept = json.loads(path.read_bytes())
        if kept["boot_id"] == boot_id:
            return codec.decode(KvmFact, kept["fact"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    fact = await probe()
    if any(word in fact.reason for word in _NOT_YET):
        return fact
    files.write_atomically(path, json.dumps({"boot_id": boot_id, "fact": codec.encode(fact)}).encode(), mode=0o644)
    return fact


async def probe(images: Path) -> KvmFact:
    """Boots a tiny guest with a kernel of a guest image on this host, or the host's own."""
    if not DEVICE.exists():
        return KvmFact(device_present=False, usable=False, reason=f"{DEVICE} does not exist")
    from hostagent.drivers.machine.kvm import host_kernels, probe_kvm, tsc_khz

    return await probe_kvm(host_kernels(images), tsc_khz=tsc_khz())


async def not_probed() -> KvmFact:
    return KvmFact(device_present=DEVICE.exists(), usable=False, reason="not probed")
