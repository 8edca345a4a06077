"""The search for planted secrets finds what it should, so that finding nothing means something."""

from __future__ import annotations

import base64
import subprocess
import sys
import uuid
from pathlib import Path

import asyncpg
import pytest

from tests.system import planted

SECRET = b"planted-0123456789abcdef"
BLOCK_BYTES = 4 << 20


@pytest.mark.parametrize(
    "content",
    [
        SECRET,
        b"x" * (BLOCK_BYTES - 7) + SECRET,
        b"\\x" + SECRET.hex().encode(),
        base64.b64encode(SECRET),
        b'{"a": "' + SECRET + b'"}',
    ],
    ids=["plain", "over the edge of a block", "hex", "base64", "json"],
)
def test_it_is_found_in_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/file").write_bytes(content)
    home = tmp_path / "home"
    home.write_bytes(SECRET)
    wanted = planted.needles({"it": SECRET})
    assert planted.in_files(tmp_path, wanted, homes=frozenset({home})) == [f"it in {tmp_path / 'deep/file'}"]
    assert len(planted.in_files(tmp_path, wanted)) == 2


@pytest.mark.parametrize("what", ["cmdline", "environ"])
def test_it_is_found_in_processes(tmp_path: Path, what: str) -> None:
    word = f"planted-{uuid.uuid4().hex}"
    environment = {"WORD": word} if what == "environ" else {}
    argv = [sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()", *([word] if what == "cmdline" else [])]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=tmp_path, env=environment, stdin=pipe, stdout=pipe) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            (found,) = planted.in_processes(tmp_path, planted.needles({"it": word.encode()}))
            assert found.startswith(f"it in {what} of {sys.executable}")
        finally:
            process.kill()


async def test_it_is_found_in_rows(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    await connection.execute("CREATE TABLE place (what bytea)")
    await connection.execute("INSERT INTO place VALUES ($1)", SECRET)
    await connection.close()
    found, size = await planted.in_database(database_url, planted.needles({"it": SECRET}))
    assert found == ["it in table public.place"]
    assert size > 0
