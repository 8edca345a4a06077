"""An empty qcow2 file whose clusters are encrypted by LUKS1 with AES-256-XTS, written in a few milliseconds.

`qemu-img` makes the same file, but measures for 2.5 s of CPU time how many rounds of PBKDF2 take a moment, and gives up where
the clock is coarse. A volume's key is random and needs no rounds, so 1,000 are taken, the least that LUKS knows.

The one rule: nothing here is ever read back by us; QEMU opens and checks it. The master key exists in this function alone.
Source: LUKS On-Disk Format Specification 1.2.3; QEMU, docs/interop/qcow2.txt.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
import uuid
from pathlib import Path

from hostagent import version
from hostagent.lib.program import run

_CLUSTER = 1 << 16
_SECTOR = 512
_ROUNDS = 1000
_STRIPES = 4000
_KEY_BYTES = 64
_SLOT_SECTORS = 504  # 500 sectors of key material, rounded up to 4 KiB
_PAYLOAD_SECTOR = 8 + 8 * _SLOT_SECTORS
_USED, _UNUSED = 0x00AC71F3, 0x0000DEAD
_L2_REACH = (_CLUSTER // 8) * _CLUSTER
_CRYPTO_HEADER = 0x0537BE77
_LUKS = 2


async def empty_disk(size_bytes: int, passphrase: bytes | None) -> bytes:
    """The whole file; without a passphrase a plain one. Raises AgentError where libcrypto is missing."""
    header = await _luks_header(passphrase) if passphrase is not None else b""
    return _qcow2(size_bytes, header)


def passphrase_of(key: bytes) -> bytes:
    """QEMU takes text alone."""
    return key.hex().encode()


async def _luks_header(passphrase: bytes) -> bytes:
    master, digest_salt, slot_salt = os.urandom(_KEY_BYTES), os.urandom(32), os.urandom(32)
    slot_key = hashlib.pbkdf2_hmac("sha256", passphrase, slot_salt, _ROUNDS, _KEY_BYTES)
    archive = version.archive()
    source = [str(archive), "xts-helper"] if archive else [str(Path(__file__).with_name("xts_helper.py"))]
    material = await run(sys.executable, "-I", *source, stdin=slot_key + _split(master))
    digest = hashlib.pbkdf2_hmac("sha256", master, digest_salt, _ROUNDS, 20)
    head = struct.pack(">6sH32s32s32sII", b"LUKS\xba\xbe", 1, b"aes", b"xts-plain64", b"sha256", _PAYLOAD_SECTOR, _KEY_BYTES)
    head += struct.pack(">20s32sI40s", digest, digest_salt, _ROUNDS, str(uuid.uuid4()).encode())
    for slot in range(8):
        state, rounds, salt = (_UNUSED, 0, b"") if slot else (_USED, _ROUNDS, slot_salt)
        head += struct.pack(">II32sII", state, rounds, salt, 8 + slot * _SLOT_SECTORS, _STRIPES)
    return (head.ljust(8 * _SECTOR, b"\0") + material.stdout).ljust(_PAYLOAD_SECTOR * _SECTOR, b"\0")


def _split(master: bytes) -> bytes:
    """So that losing one stripe loses the key (section 2.4 of the specification)."""
    stripes, mixed = [], bytes(_KEY_BYTES)
    for _ in range(_STRIPES - 1):
        stripes.append(os.urandom(_KEY_BYTES))
        mixed = _diffused(_xor(mixed, stripes[-1]))
    return b"".join([*stripes, _xor(mixed, master)])


def _diffused(block: bytes) -> bytes:
    halves = (block[:32], block[32:])
    return b"".join(hashlib.sha256(number.to_bytes(4, "big") + half).digest() for number, half in enumerate(halves))


def _xor(one: bytes, other: bytes) -> bytes:
    return (int.from_bytes(one, "big") ^ int.from_bytes(other, "big")).to_bytes(_KEY_BYTES, "big")


def _qcow2(size_bytes: int, luks: bytes) -> bytes:
    """Clusters: the header, the refcount table, a refcount block, the L1 table, then LUKS. It names no backing file."""
    l1_entries = -(-size_bytes // _L2_REACH)
    l1_clusters = max(1, -(-l1_entries * 8 // _CLUSTER))
    luks_at = (3 + l1_clusters) * _CLUSTER
    clusters = 3 + l1_clusters + -(-len(luks) // _CLUSTER)
    head = struct.pack(">4sIQIIQIIQQIIQ", b"QFI\xfb", 3, 0, 0, 16, size_bytes, _LUKS if luks else 0, l1_entries,
                       3 * _CLUSTER, _CLUSTER, 1, 0, 0)  # fmt: skip
    head += struct.pack(">QQQII", 0, 0, 0, 4, 104)
    if luks:
        head += struct.pack(">IIQQ", _CRYPTO_HEADER, 16, luks_at, len(luks))
    head += struct.pack(">II", 0, 0)
    table = struct.pack(">Q", 2 * _CLUSTER)
    block = struct.pack(">H", 1) * clusters
    fixed = b"".join(part.ljust(_CLUSTER, b"\0") for part in (head, table, block))
    return (fixed + bytes(l1_clusters * _CLUSTER) + luks).ljust(clusters * _CLUSTER, b"\0")
