"""Looks for planted secrets wherever a deployment and its hosts write, show or keep something.

The one rule: a secret is looked for as it is, as hex and as base64, and in every place but the one file that is its home.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Mapping
from pathlib import Path

import asyncpg

from controlplane.embedded.cleaning import processes_of

GUESTS_OWN = (".qcow2", ".raw")  # a tenant's own disk holds what the tenant wrote there
_BLOCK_BYTES = 4 << 20
_OVERLAP_BYTES = 4096


def needles(secrets: Mapping[str, bytes]) -> dict[bytes, str]:
    """Every form of every secret, and whose it is."""
    forms: dict[bytes, str] = {}
    for name, secret in secrets.items():
        assert 16 <= len(secret) < _OVERLAP_BYTES // 2, f"{name} would be found anywhere, or nowhere"
        for form in (secret, secret.hex().encode(), secret.hex().upper().encode(), base64.b64encode(secret).rstrip(b"=")):
            forms[form] = name
    return forms


def in_files(top: Path, wanted: Mapping[bytes, str], *, homes: frozenset[Path] = frozenset()) -> list[str]:
    """`secret in file` for every file below `top` but `homes`; mounts of others and devices are not entered."""
    found: list[str] = []
    for path in top.rglob("*"):
        with contextlib.suppress(OSError):  # gone in between
            if path.is_symlink() or not path.is_file() or path in homes or path.suffix in GUESTS_OWN:
                continue
            found += [f"{name} in {path}" for name in _in_file(path, wanted)]
    return found


def _in_file(path: Path, wanted: Mapping[bytes, str]) -> set[str]:
    seen: set[str] = set()
    before = b""
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            text = before + block
            seen |= {name for needle, name in wanted.items() if needle in text}
            before = text[-_OVERLAP_BYTES:]
    return seen


def in_processes(directory: Path, wanted: Mapping[bytes, str]) -> list[str]:
    """In arguments and environment of every process that belongs to the directory, those of lab hosts with them."""
    found: list[str] = []
    for pid in processes_of(directory):
        for what in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                content = Path(f"/proc/{pid}/{what}").read_bytes()
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found += [f"{name} in {what} of {command}" for needle, name in wanted.items() if needle in content]
    return found


async def in_database(url: str, wanted: Mapping[bytes, str]) -> tuple[list[str], int]:
    """What every table shows as text, which is what a dump holds; and how many bytes that was."""
    connection = await asyncpg.connect(url)
    found: list[str] = []
    size = 0
    try:
        tables = await connection.fetch(
            "SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname) AS name FROM pg_class c"
            " JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE c.relkind = 'r' AND n.nspname NOT IN ('pg_catalog', 'information_schema')"
        )
        for table in tables:
            for row in await connection.fetch(f"SELECT t::text AS line FROM {table['name']} t"):
                line = row["line"].encode()
                size += len(line)
                found += [f"{name} in table {table['name']}" for needle, name in wanted.items() if needle in line]
    finally:
        await connection.close()
    return found, size
