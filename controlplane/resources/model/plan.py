"""From a model and its engine to what a replica is: its document's parts, and how much memory it needs and why. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from controlplane.core import json
from controlplane.core.json import JsonObject
from controlplane.resources.model.catalogue import WEIGHTS_PATH, EngineEntry, ModelEntry

GUEST_BYTES = 160 << 20
_STEP = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    reason: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A model resolved with its engine; `spec` is kept with models and endpoints."""

    model: ModelEntry
    engine: EngineEntry

    @property
    def spec(self) -> JsonObject:
        """`served_model_id` is what replicas call the model; the gateway and the probes go by it."""
        model = self.model.model_dump(mode="json", exclude={"engine"})
        return {**model, "served_model_id": self.model.name, "engine": self.engine.model_dump(mode="json")}

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.canonical(self.spec)).hexdigest()

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.model.files)

    def memory(self, isolation: str = "container") -> tuple[MemoryPart, ...]:
        """The sum that a replica needs, part by part; a VM has a system of its own besides."""
        tokens = self.model.context_tokens * self.model.parallel
        guest = (MemoryPart(reason="the guest's kernel and system", bytes=GUEST_BYTES),) if isolation == "vm" else ()
        return (
            *guest,
            MemoryPart(reason="weights", bytes=self.size_bytes),
            MemoryPart(
                reason=f"KV cache of {tokens} tokens ({self.model.parallel} × {self.model.context_tokens})",
                bytes=tokens * self.model.memory.kv_bytes_per_token,
            ),
            MemoryPart(reason="engine, buffers and margin", bytes=self.model.memory.overhead_bytes),
        )

    def memory_bytes(self, isolation: str = "container") -> int:
        """The sum, rounded up to 64 MiB."""
        total = sum(part.bytes for part in self.memory(isolation))
        return -(-total // _STEP) * _STEP


def plan_of(spec: JsonObject) -> Plan:
    """The plan that a stored spec came from; what endpoints add to it is left out."""
    model = {key: value for key, value in spec.items() if key in ModelEntry.model_fields}
    engine = EngineEntry.model_validate(spec["engine"])
    return Plan(model=ModelEntry.model_validate({**model, "engine": engine.name}), engine=engine)


def workload(plan: Plan, *, vcpus: int, weights_image_id: str, root_image_id: str = "") -> JsonObject:
    """The command of a replica, as `hostagent.protocol.wanted.WorkloadWanted` reads it. `root_image_id`: the engine's image,
    where the machine has another one of its own.
    """
    engine = plan.engine
    words = {
        "weights": WEIGHTS_PATH,
        "file": plan.model.files[0].name,
        "served_model_id": plan.model.name,
        "context_tokens": plan.model.context_tokens,
        "parallel": plan.model.parallel,
        "vcpus": vcpus,
        "port": engine.port,
    }
    return {
        "argv": [part.format(**words) for part in engine.argv],
        "env": {name: text.format(**words) for name, text in engine.env.items()},
        "mounts": [{"image_id": weights_image_id, "path": WEIGHTS_PATH}],
        "port": engine.port,
        "health_path": engine.health_path,
        "root_image_id": root_image_id,
    }
