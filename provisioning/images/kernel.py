"""Kernel and initramfs of a guest image, from an unpacked Debian kernel package.

The one rule: the initramfs holds busybox, one script and the modules that stand between the kernel and its root disk, in
the order in which they load, and nothing else (below 4 MB, because it is read at every boot).
"""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

from provisioning.images.debian import BuildError, run

BOOT_MODULES = (
    "virtio_pci",
    "virtio_blk",
    "virtio_net",
    "virtio-rng",
    "virtio_console",
    "vfat",
    "nls_cp437",
    "nls_ascii",
    "nls_utf8",
    "evdev",
    "button",
)
KEPT_MODULES = (
    "arch/x86/crypto",
    "crypto",
    "drivers/acpi",
    "drivers/block",
    "drivers/char",
    "drivers/input",
    "drivers/md",
    "drivers/net/*.ko",
    "drivers/net/vxlan",
    "drivers/net/wireguard",
    "drivers/nvme",
    "drivers/vhost",
    "drivers/virtio",
    "fs/fat",
    "fs/fuse",
    "fs/isofs",
    "fs/nls",
    "fs/overlayfs",
    "fs/squashfs",
    "lib",
    "net",
)
LZ4_LEGACY_MAGIC = b"\x02\x21\x4c\x18"
MAX_INITRAMFS_BYTES = 4 << 20


def release_of(unpacked: Path) -> str:
    """The kernel's own name of itself, for example `6.1.0-40-cloud-amd64`."""
    (found,) = list((unpacked / "lib/modules").iterdir())
    return found.name


def copy_modules(unpacked: Path, tree: Path, release: str) -> None:
    """The modules a guest may want, into the root tree, with a fresh modules.dep."""
    source, target = unpacked / "lib/modules" / release, tree / "usr/lib/modules" / release
    for pattern in KEPT_MODULES:
        for place in sorted((source / "kernel").glob(pattern)):
            destination = target / "kernel" / place.relative_to(source / "kernel")
            destination.parent.mkdir(parents=True, exist_ok=True)
            if place.is_dir():
                shutil.copytree(place, destination, dirs_exist_ok=True)
            else:
                shutil.copyfile(place, destination)
    for name in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
        shutil.copyfile(source / name, target / name)
    run(["depmod", "-b", str(tree), release])


def load_order(modules: Path, names: tuple[str, ...]) -> list[Path]:
    """Files (relative to `modules`) in an order in which insmod finds every symbol, from modules.dep (depmod(8))."""
    dependencies: dict[str, list[str]] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        file, _, needs = line.partition(":")
        dependencies[file] = needs.split()
    by_name = {Path(file).name.split(".ko")[0].replace("-", "_"): file for file in dependencies}
    order: list[Path] = []
    for name in names:
        file = by_name.get(name.replace("-", "_"))
        if file is None:
            continue  # built in
        for needed in [*reversed(dependencies[file]), file]:
            if Path(needed) not in order:
                order.append(Path(needed))
    return order


def make_initramfs(target: Path, *, init: Path, busybox: Path, modules: Path) -> None:
    """Writes an uncompressed newc archive (Documentation/driver-api/early-userspace/buffer-format.rst)."""
    order = load_order(modules, BOOT_MODULES)
    if not any(path.name.startswith("virtio_blk") for path in order):
        raise BuildError("the kernel package has no virtio_blk module")
    archive = bytearray()
    for name in ("bin", "dev", "lib", "root"):
        archive += _entry(name, 0o040755, b"")
    archive += _entry("dev/console", 0o020600, b"", device=(5, 1))
    archive += _entry("bin/busybox", 0o100755, busybox.read_bytes())
    archive += _entry("init", 0o100755, init.read_bytes())
    archive += _entry("modules", 0o100644, "".join(f"{path.name}\n" for path in order).encode())
    for path in order:
        archive += _entry(f"lib/{path.name}", 0o100644, (modules / path).read_bytes())
    archive += _entry("TRAILER!!!", 0, b"")
    if len(archive) > MAX_INITRAMFS_BYTES:
        raise BuildError(f"the initramfs has {len(archive)} bytes, more than {MAX_INITRAMFS_BYTES}")
    target.write_bytes(archive)


def _entry(name: str, mode: int, content: bytes, *, device: tuple[int, int] = (0, 0)) -> bytes:
    encoded = name.encode() + b"\0"
    number = sum(encoded) * 65536 + len(content) & 0xFFFFFFFF  # any number: links are not used
    fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(encoded), 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields)
    return _padded(head + encoded) + _padded(content)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)


def extract_kernel(bzimage: Path, target: Path) -> None:
    """The ELF kernel inside a bzImage whose payload is LZ4 (it then starts without unpacking itself, by its PVH entry).

    Another payload, or no lz4 program: the bzImage itself, which every machine driver takes as well.
    Source: Documentation/arch/x86/boot.rst, fields setup_sects, payload_offset, payload_length.
    """
    image = bzimage.read_bytes()
    setup_sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    payload = image[start : start + length - 4]  # the last four bytes are the unpacked size
    if payload.startswith(LZ4_LEGACY_MAGIC) and shutil.which("lz4"):
        packed = target.with_name("payload.lz4")
        packed.write_bytes(payload)
        run(["lz4", "-d", "-f", "-q", str(packed), str(target)])
        packed.unlink()
    else:
        target.write_bytes(image)
