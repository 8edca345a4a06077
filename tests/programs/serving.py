"""Endpoints on hosts with fake drivers: a model in the catalogue's form with tiny files, and engines that answer as told."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

from sqlalchemy import delete, select

from controlplane.core.ids import Kind, new_id
from controlplane.kernel.registry import Registry
from controlplane.models.image import Image, ImageFile
from controlplane.models.model import Model
from controlplane.models.run import Run
from controlplane.models.signal import Signal
from controlplane.resources.endpoint import service as endpoints
from controlplane.resources.endpoint.program import EndpointProgram
from controlplane.resources.endpoint.schemas import EndpointCreate
from controlplane.resources.image import service as images
from controlplane.resources.image.store import ImageStore
from controlplane.resources.model.catalogue import Catalogue
from controlplane.resources.model.plan import Plan
from controlplane.resources.model.service import plan
from controlplane.resources.replica.program import ReplicaProgram
from hostagent.protocol.errors import AgentError
from hostagent.protocol.verbs import StreamRequest
from tests.programs.fleet import PROGRAMS, Fleet

MODEL = "smollm2-135m-instruct"
PURPOSES = ("weights", "engine")
REGISTRY = Registry((*PROGRAMS, EndpointProgram, ReplicaProgram))


def listing(*ids: str) -> bytes:
    body = json.dumps({"object": "list", "data": [{"id": model} for model in ids]}).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


@dataclass
class Engines:
    """What replicas answer on their port: `says` by default, `by_machine` where told; None = nobody listens."""

    says: bytes | None = listing(MODEL)
    by_machine: dict[str, bytes | None] = field(default_factory=dict)

    def open(self, host_id: str, request: StreamRequest) -> _Answer:
        assert (request.kind, request.port) == ("tcp", 8000)
        says = self.by_machine.get(request.id, self.says)
        if says is None:
            raise AgentError("stream.refused", "nobody listens on port 8000")
        return _Answer(says)


@dataclass
class _Answer:
    content: bytes

    async def read(self, limit: int = 65_536) -> bytes:
        part, self.content = self.content[:limit], self.content[limit:]
        return part

    async def write(self, data: bytes) -> None:
        assert data.startswith(b"GET /v1/models ")

    async def write_eof(self) -> None: ...

    async def close(self) -> None: ...


async def import_model(fleet: Fleet, entry: Plan | None = None, files: dict[str, tuple[str, bytes]] | None = None) -> None:
    """A model of the catalogue, with tiny files in place of weights and engine: (name, content) by purpose."""
    entry = entry or plan(Catalogue.of(fleet.root), MODEL)
    store = ImageStore(fleet.world.settings.state_dir)
    ids = {}
    async with fleet.database.session() as session:
        assert fleet.project
        (await session.merge(fleet.project)).allow_containers = True
        fleet.project.allow_containers = True
        for purpose, (name, content) in (files or {what: ("f", f"the {what}".encode()) for what in PURPOSES}).items():
            sha256 = hashlib.sha256(content).hexdigest()
            path = fleet.root / purpose
            path.write_bytes(content)
            await store.take_file(path, sha256=sha256, size_bytes=len(content))
            await images.record_blob(session, sha256, len(content))
            image = Image(
                id=new_id(Kind.IMAGE),
                name=purpose,
                purpose=purpose,
                architecture="x86_64",
                default_user="root",
                boot={"kind": "none"},
                root_file=name,
                min_disk_bytes=1,
                min_memory_bytes=1,
            )
            session.add(image)
            await session.flush()
            session.add(ImageFile(image_id=image.id, name=name, sha256=sha256, size_bytes=len(content)))
            await session.flush()
            await images.settle(session, image)
            ids[f"{purpose}_image_id"] = image.id
        session.add(Model(id=new_id(Kind.MODEL), name=MODEL, spec=entry.spec, digest=entry.digest, state="available", **ids))


async def create(fleet: Fleet, name: str = "chat", **wanted: object) -> str:
    body = EndpointCreate.model_validate({"name": name, "model": MODEL, **wanted})
    async with fleet.database.session() as session:
        assert fleet.project
        return (await endpoints.create(session, fleet.world.settings.network, fleet.project, body)).id


async def create_without_keeper(fleet: Fleet, **wanted: object) -> str:
    """An endpoint without a run, so that nobody takes away what a test makes for it."""
    endpoint_id = await create(fleet, replicas=0, **wanted)
    async with fleet.database.session() as session:
        run_ids = select(Run.id).where(Run.program == "endpoint", Run.subject == endpoint_id)
        await session.execute(delete(Signal).where(Signal.run_id.in_(run_ids)))
        await session.execute(delete(Run).where(Run.program == "endpoint", Run.subject == endpoint_id))
    return endpoint_id
