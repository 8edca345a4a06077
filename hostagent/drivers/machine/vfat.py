"""A vfat disk image of a few files, written without any program: FAT12, one root directory, long names.

The one rule: the same files make the same bytes (no clock, no random serial), so an image can be compared by digest.
Source: Microsoft FAT32 File System Specification (fatgen103), sections on the BPB, FAT12 entries and long names.
"""

from __future__ import annotations

import struct
import zlib

SECTOR_BYTES = 512
CLUSTER_SECTORS = 4
CLUSTER_BYTES = SECTOR_BYTES * CLUSTER_SECTORS
ROOT_ENTRIES = 112
ROOT_SECTORS = ROOT_ENTRIES * 32 // SECTOR_BYTES
MAX_CLUSTERS = 4084  # one more and every reader takes the FAT for FAT16
MIN_CLUSTERS = 256
MEDIA = 0xF8
ATTRIBUTE_VOLUME = 0x08
ATTRIBUTE_FILE = 0x01  # read-only
ATTRIBUTE_LONG_NAME = 0x0F
DATE_1980 = 0x0021


class ImageTooLargeError(ValueError):
    """The files do not fit into a FAT12 image (about 8 MiB)."""


def vfat_image(label: str, files: dict[str, bytes]) -> bytes:
    """The image's bytes; raises ImageTooLargeError. Names are ASCII, at most 26 characters."""
    needed = sum(-(-len(content) // CLUSTER_BYTES) for content in files.values())
    clusters = max(needed, MIN_CLUSTERS)
    if clusters > MAX_CLUSTERS:
        raise ImageTooLargeError(f"the seed needs {needed} clusters of {CLUSTER_BYTES} bytes, {MAX_CLUSTERS} are possible")
    chains, directory, data = [], [_entry(label.upper().ljust(11)[:11].encode(), ATTRIBUTE_VOLUME, 0, 0)], bytearray()
    for index, (name, content) in enumerate(files.items()):
        length = -(-len(content) // CLUSTER_BYTES)
        first = 2 + len(data) // CLUSTER_BYTES if length else 0
        chains.append((first, length))
        directory += _named_entries(name, index, first, len(content))
        data += content.ljust(length * CLUSTER_BYTES, b"\0")
    fat_sectors = -(-((clusters + 2) * 3 // 2 + 1) // SECTOR_BYTES)
    fat = _fat12(chains, clusters).ljust(fat_sectors * SECTOR_BYTES, b"\0")
    root = b"".join(directory)
    if len(root) > ROOT_SECTORS * SECTOR_BYTES:
        raise ImageTooLargeError("too many files")
    boot = _boot_sector(label, clusters, fat_sectors, zlib.crc32(bytes(data)))
    return (
        boot + fat + fat + root.ljust(ROOT_SECTORS * SECTOR_BYTES, b"\0") + bytes(data).ljust(clusters * CLUSTER_BYTES, b"\0")
    )


def _boot_sector(label: str, clusters: int, fat_sectors: int, serial: int) -> bytes:
    sectors = 1 + 2 * fat_sectors + ROOT_SECTORS + clusters * CLUSTER_SECTORS
    bpb = struct.pack(
        "<HBHBHHBHHHII", SECTOR_BYTES, CLUSTER_SECTORS, 1, 2, ROOT_ENTRIES, sectors, MEDIA, fat_sectors, 32, 64, 0, 0
    )
    extended = struct.pack("<BBBI", 0x80, 0, 0x29, serial) + label.upper().ljust(11)[:11].encode() + b"FAT12   "
    return (b"\xeb\x3c\x90" + b"BEDPLATE" + bpb + extended).ljust(SECTOR_BYTES - 2, b"\0") + b"\x55\xaa"


def _fat12(chains: list[tuple[int, int]], clusters: int) -> bytes:
    entries = [0] * (clusters + 2)
    entries[0], entries[1] = 0xF00 | MEDIA, 0xFFF
    for first, length in chains:
        for offset in range(length):
            entries[first + offset] = 0xFFF if offset == length - 1 else first + offset + 1
    if len(entries) % 2:
        entries.append(0)
    packed = bytearray()
    for low, high in zip(entries[::2], entries[1::2], strict=True):
        packed += bytes((low & 0xFF, low >> 8 | (high & 0xF) << 4, high >> 4))
    return bytes(packed)


def _entry(short_name: bytes, attribute: int, first_cluster: int, size: int) -> bytes:
    fields = (short_name, attribute, 0, 0, 0, DATE_1980, DATE_1980, 0, 0, DATE_1980, first_cluster, size)
    return struct.pack("<11sBBBHHHHHHHI", *fields)


def _named_entries(name: str, index: int, first_cluster: int, size: int) -> list[bytes]:
    """The long-name entries of one file (last part first) and its short entry with a made-up unique name."""
    if not name.isascii() or not 0 < len(name) <= 26:
        raise ValueError(f"not a name for a seed file: {name!r}")
    short = f"FILE{index:04d}".encode().ljust(11)
    checksum = 0
    for byte in short:
        checksum = ((checksum >> 1) | (checksum & 1) << 7) + byte & 0xFF
    parts = [name[start : start + 13] for start in range(0, len(name), 13)]
    entries = []
    for number, part in reversed(list(enumerate(parts, start=1))):
        order = number | (0x40 if number == len(parts) else 0)
        units = part.encode("utf-16-le") + (b"\0\0" if len(part) < 13 else b"")
        units = units.ljust(26, b"\xff")
        head = struct.pack("<B10sBBB", order, units[:10], ATTRIBUTE_LONG_NAME, 0, checksum)
        entries.append(head + units[10:22] + b"\0\0" + units[22:26])
    return [*entries, _entry(short, ATTRIBUTE_FILE, first_cluster, size)]
