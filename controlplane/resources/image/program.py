"""Lives of images: a copy on a host, and the end of an image. Uploads to one host of one image are one run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Literal, cast

from sqlalchemy import Select, delete, exists, func, select, update

from controlplane.core.pace import Pace
from controlplane.kernel import epoch
from controlplane.kernel.program import Outcome, Program, Terminal, done, goto, step, wait
from controlplane.models.image import Blob, Image, ImageCopy, ImageFile
from controlplane.remote.link import HostLinks, HostUnreachable
from controlplane.remote.refusal import carried_out, refusals_park
from controlplane.resources.image import service
from controlplane.resources.image.errors import BlobMismatch
from controlplane.resources.image.fetch import FetchBusy, FetchRefused, Wanted, fetch, pace_of, part_of
from controlplane.resources.image.queries import files_of
from controlplane.resources.image.store import ImageStore
from hostagent.protocol.results import Running
from hostagent.protocol.wanted import FileWanted, Generation, ImageWanted

LOOK_SECONDS = 600
Purpose = Literal["guest", "weights", "engine", "artifact"]


_NUMBER = 1  # the content of an image never changes, so one generation is enough


class ImageCopyProgram(Program[ImageCopy, HostLinks]):
    """Owns one image on one host: uploads what is missing, keeps looking, removes it."""

    @step(within=timedelta(hours=1))
    async def copy(self) -> Outcome:
        """Tell the host of the image, and send the files it asks for; a cut upload goes on where it stopped."""
        wanted, store = await self._wanted(), ImageStore(self.world.settings.state_dir)
        with refusals_park():
            result = await self.world.hosts.ensure(self.subject.host_id, wanted)
            if isinstance(result, Running) and result.needs:
                for sha256 in result.needs:
                    await self.world.hosts.upload(self.subject.host_id, store.path(sha256), sha256)
                return goto(self.copy)
            if carried_out(result) is None:
                return wait(seconds=2)
        async with self.tx() as tx:
            await tx.session.execute(
                update(ImageCopy).where(ImageCopy.id == self.subject_id).values(state="present", present_at=func.now())
            )
            return tx.goto(self.keep)

    @step(within=None)
    async def keep(self) -> Outcome:
        """At rest: the copy is whole. Look now and then, and when told to."""
        try:
            seen = await self.world.hosts.observe(self.subject.host_id, "image", self.subject.image_id)
        except HostUnreachable:
            return wait(seconds=LOOK_SECONDS)
        async with self.tx() as tx:
            generation = Generation(epoch=await epoch.current(tx.session), number=_NUMBER)
        if seen is None or seen.state != "present" or seen.generation != generation:
            return goto(self.copy)
        return wait(seconds=LOOK_SECONDS)

    @step(within=timedelta(hours=1))
    async def destroy(self) -> Outcome:
        """Remove the copy from its host, then the row."""
        if not self.has_subject:
            return done()
        copy = self.subject
        async with self.tx() as tx:
            generation = Generation(epoch=await epoch.current(tx.session), number=_NUMBER)
            await tx.session.execute(update(ImageCopy).where(ImageCopy.id == copy.id).values(state="purging", present_at=None))
        with refusals_park():
            if carried_out(await self.world.hosts.purge(copy.host_id, "image", copy.image_id, generation)) is None:
                return wait(seconds=2)
        async with self.tx() as tx:
            await tx.session.execute(delete(ImageCopy).where(ImageCopy.id == copy.id))
            self.signal("image", copy.image_id, "copy_gone")
            return tx.done()

    async def _wanted(self) -> ImageWanted:
        async with self.tx() as tx:
            files = await files_of(tx.session, self.subject.image_id)
            purpose = (await tx.session.get_one(Image, self.subject.image_id)).purpose
            generation = Generation(epoch=await epoch.current(tx.session), number=_NUMBER)
        return ImageWanted(
            id=self.subject.image_id,
            generation=generation,
            purpose=cast("Purpose", purpose),
            files=tuple(FileWanted(name=file.name, sha256=file.sha256, size_bytes=file.size_bytes) for file in files),
        )


class ImageProgram(Program[Image, HostLinks]):
    """Fetches an image's files that have a URL; and its end: its copies on hosts, its row, the blobs that no other has."""

    @step(within=timedelta(hours=1))
    async def fetch(self) -> Outcome:
        """The next file that is missing, a minute at a time where its server lets us; one that is whole needs no run."""
        file = await self._missing() if self.has_subject else None
        if file is None:
            return done()
        store = ImageStore(self.world.settings.state_dir)
        wanted = Wanted(url=str(file.url), sha256=file.sha256, size_bytes=file.size_bytes)
        try:
            is_whole = store.has(file.sha256, file.size_bytes) or await fetch(store, wanted, self._pace, self._progress(file))
        except FetchBusy:
            return wait(seconds=2)
        except BlobMismatch as error:
            raise Terminal("image.blob_mismatch", error.detail) from error
        except FetchRefused as error:
            raise Terminal("image.fetch_refused", str(error)) from error
        if not is_whole:
            return goto(self.fetch)
        async with self.tx() as tx:
            await service.record_blob(tx.session, file.sha256, file.size_bytes)
            await service.settle(tx.session, await tx.session.get_one(Image, self.subject_id))
            return tx.goto(self.fetch)

    async def _missing(self) -> ImageFile | None:
        stored = exists().where(Blob.sha256 == ImageFile.sha256, Blob.removing_at.is_(None))
        mine = ImageFile.image_id == self.subject_id, ImageFile.url.is_not(None)
        async with self.tx() as tx:
            return await tx.session.scalar(select(ImageFile).where(*mine, ~stored).order_by(ImageFile.name).limit(1))

    def _progress(self, file: ImageFile) -> Callable[[int], Awaitable[None]]:
        async def tell(fetched_bytes: int) -> None:
            mine = ImageFile.image_id == file.image_id, ImageFile.name == file.name
            async with self.tx() as tx:
                await tx.session.execute(update(ImageFile).where(*mine).values(fetched_bytes=fetched_bytes))

        return tell

    @property
    def _pace(self) -> Pace:
        return pace_of(self.world.settings.images.download_bytes_per_second)

    @step(within=timedelta(hours=2))
    async def destroy(self) -> Outcome:
        async with self.tx() as tx:
            copies = list(await tx.session.scalars(select(ImageCopy.id).where(ImageCopy.image_id == self.subject_id)))
            for copy_id in copies:
                self.spawn(ImageCopyProgram, copy_id)
                self.destroy_child(ImageCopyProgram, copy_id)
        if copies:
            return wait(seconds=30)
        store = ImageStore(self.world.settings.state_dir)
        for sha256 in await self._unneeded():
            await asyncio.to_thread(store.remove, sha256)
        for sha256 in await self._own():
            await asyncio.to_thread(part_of(store, sha256).unlink, missing_ok=True)
        async with self.tx() as tx:
            await tx.session.execute(delete(Blob).where(Blob.sha256.in_(self._mine), Blob.removing_at.is_not(None)))
            await tx.session.execute(delete(Image).where(Image.id == self.subject_id))
            return tx.done()

    @property
    def _mine(self) -> Select[str]:
        return select(ImageFile.sha256).where(ImageFile.image_id == self.subject_id)

    async def _own(self) -> list[str]:
        async with self.tx() as tx:
            return list(await tx.session.scalars(self._mine))

    async def _unneeded(self) -> list[str]:
        """Marks the blobs that only this image has. What an image made meanwhile has too is seen at the second look: whoever
        counts a blob holds its row until its own commit (`service.settle`), and the mark waits for that.
        """
        other = exists().where(ImageFile.sha256 == Blob.sha256, ImageFile.image_id != self.subject_id)
        async with self.tx() as tx:
            mark = update(Blob).where(Blob.sha256.in_(self._mine), ~other, Blob.removing_at.is_(None))
            await tx.session.execute(mark.values(removing_at=func.now()))
        async with self.tx() as tx:
            marked = Blob.sha256.in_(self._mine), Blob.removing_at.is_not(None)
            await tx.session.execute(update(Blob).where(*marked, other).values(removing_at=None))
            return list(await tx.session.scalars(select(Blob.sha256).where(*marked)))
