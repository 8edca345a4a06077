"""A form (multipart/form-data) on its way to a replica: kept in a file while it arrives, sent from there piece by piece.

The one rule: memory holds one piece, whatever the size; and the form's bytes are the client's, but for the value of `model`.
(RFC 7578; the field may stand behind the file.)
"""

from __future__ import annotations

import mmap
import re
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO

from controlplane.gateway import problem
from controlplane.gateway.body import Asked

_PIECE_BYTES = 1 << 18
_BOUNDARY = re.compile(rb'boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'[;\s]name="([^"]*)"', re.IGNORECASE)
_HEAD_BYTES = 8192
_VALUE_BYTES = 256


class Upload:
    """Write what arrives, `understand` it once, then read it as often as replicas are tried. Closing removes it."""

    def __init__(self, directory: Path, content_type: bytes) -> None:
        found = _BOUNDARY.search(content_type)
        if found is None:
            raise problem.bad_request("A multipart body needs a boundary in its content-type.")
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._boundary = b"--" + (found[1] or found[2])
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - lives as long as the request
        self._model = (0, 0)
        self.size_bytes = 0

    def write(self, part: bytes) -> None:
        self._file.write(part)
        self.size_bytes += len(part)

    def understand(self) -> Asked:
        """Raises Problem 400 for anything but a form with a model."""
        self._file.flush()
        fields: dict[bytes, tuple[int, int]] = {}
        if self.size_bytes:
            with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as form:
                fields = _fields(form, self._boundary)
                values = {name: form[start : min(end, start + _VALUE_BYTES)] for name, (start, end) in fields.items()}
        else:
            values = {}
        model = values.get(b"model", b"").decode("utf-8", "replace").strip()
        if not model:
            raise problem.bad_request("You must provide a model parameter.", param="model")
        self._model = fields[b"model"]
        return Asked(
            model=model,
            is_stream=values.get(b"stream", b"").strip().lower() == b"true",
            wants_usage=False,
            wants_continuous_usage=False,
            stream_options=None,
            max_tokens=None,
        )

    def length(self, model: str) -> int:
        start, end = self._model
        return self.size_bytes - (end - start) + len(model.encode())

    async def pieces(self, model: str) -> AsyncIterator[bytes]:
        """The form with that model."""
        start, end = self._model
        for piece in self._between(0, start):
            yield piece
        yield model.encode()
        for piece in self._between(end, self.size_bytes):
            yield piece

    def _between(self, start: int, end: int) -> Iterator[bytes]:
        place = start
        while place < end:
            self._file.seek(place)
            piece = self._file.read(min(_PIECE_BYTES, end - place))
            if not piece:
                return
            place += len(piece)
            yield piece

    def close(self) -> None:
        self._file.close()


def _fields(form: mmap.mmap, boundary: bytes) -> dict[bytes, tuple[int, int]]:
    """Where the value of each field lies; of fields that come twice the last. Raises Problem 400 for what is no form."""
    fields: dict[bytes, tuple[int, int]] = {}
    if form[: len(boundary)] != boundary:
        raise problem.bad_request("The multipart body does not begin with its boundary.")
    place = len(boundary)
    while form[place : place + 2] == b"\r\n":
        head_end = form.find(b"\r\n\r\n", place, place + _HEAD_BYTES)
        value_end = form.find(b"\r\n" + boundary, head_end + 2 if head_end >= 0 else place)
        if head_end < 0 or value_end < 0:
            raise problem.bad_request("The multipart body is cut.")
        if name := _NAME.search(form[place:head_end]):
            fields[name[1]] = (min(head_end + 4, value_end), value_end)
        place = value_end + 2 + len(boundary)
    return fields
