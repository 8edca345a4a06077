"""Whether KVM is usable. The one rule: only a guest that booted with it proves it; the answer is kept for this boot."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from hostagent.lib import files
from hostagent.protocol import codec
from hostagent.protocol.facts import KvmFact

DEVICE = Path("/dev/kvm")

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
    files.write_atomically(path, json.dumps({"boot_id": boot_id, "fact": codec.encode(fact)}).encode(), mode=0o644)
    return fact


async def probe() -> KvmFact:
    """Without the device there is nothing to try; with it the machine drivers' tiny guest decides."""
    if not DEVICE.exists():
        return KvmFact(device_present=False, usable=False, reason=f"{DEVICE} does not exist")
    if importlib.util.find_spec("hostagent.drivers.machine.kvm") is None:
        return KvmFact(device_present=True, usable=False, reason="this agent has no guest to try it with")
    module = importlib.import_module("hostagent.drivers.machine.kvm")
    return await module.probe()


async def not_probed() -> KvmFact:
    return KvmFact(device_present=DEVICE.exists(), usable=False, reason="not probed")
