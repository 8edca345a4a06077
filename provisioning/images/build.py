"""Builds a guest image once and keeps it: base tree, kernel, root file system, manifest.

The one rule: a directory in the cache is complete or absent. It is made under another name and renamed at the end.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from provisioning.images.debian import BuildError, download_kernel, find_mirror, make_tree, run
from provisioning.images.kernel import copy_modules, extract_kernel, make_initramfs, release_of
from provisioning.images.manifest import MANIFEST, Boot, Manifest, ManifestFile, write_manifest
from provisioning.images.recipe import FILES, Recipe
from provisioning.images.rootfs import shape_tree

ROOT_FILE, KERNEL_FILE, INITRAMFS_FILE = "root.qcow2", "vmlinux", "initramfs.cpio"
MIN_MEMORY_BYTES = 256 << 20


def default_cache() -> Path:
    """`BEDPLATE_CACHE_DIR` (or `BEDPLATE_CACHE`), else ~/.cache/bedplate."""
    configured = os.environ.get("BEDPLATE_CACHE_DIR") or os.environ.get("BEDPLATE_CACHE")
    return Path(configured) if configured else Path.home() / ".cache/bedplate"


def build(
    recipe: Recipe | None = None,
    *,
    cache: Path | None = None,
    mirror: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """The directory of the finished image (with manifest.json); built when the cache has none. Needs root."""
    recipe = recipe or Recipe()
    cache = (cache or default_cache()) / "images"
    cache.mkdir(parents=True, exist_ok=True)
    finished = cache / f"{recipe.name}-{recipe.digest()[:16]}"
    with _locked(cache):
        if not (finished / MANIFEST).exists():
            if os.geteuid() != 0:
                raise BuildError("building an image needs root (debootstrap and file ownership)")
            _build(recipe, finished, find_mirror(recipe.suite, mirror or os.environ.get("BEDPLATE_APT_MIRROR", "")), say)
    return finished


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """One build at a time in one cache; a second one waits and finds the result."""
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(recipe: Recipe, finished: Path, mirror: str, say: Callable[[str], None]) -> None:
    base = finished.parent / f"base-{recipe.tree_digest()[:16]}"
    if not base.exists():
        say(f"debootstrap of {recipe.suite} ({len(recipe.packages)} packages)")
        make_tree(base, suite=recipe.suite, mirror=mirror, packages=recipe.packages)
    work = finished.with_name(f"{finished.name}.new")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        say(f"kernel {recipe.kernel_package}")
        architecture = recipe.debian_architecture
        unpacked = download_kernel(
            _made(work / "kernel"), suite=recipe.suite, mirror=mirror, package=recipe.kernel_package, architecture=architecture
        )
        say("root file system")
        tree = work / "tree"
        run(["cp", "-a", "--reflink=auto", str(base), str(tree)])
        _assemble(recipe, work, tree, unpacked, mirror)
        shutil.rmtree(tree)
        shutil.rmtree(work / "kernel")
        work.rename(finished)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def _assemble(recipe: Recipe, work: Path, tree: Path, unpacked: Path, mirror: str) -> None:
    release = release_of(unpacked)
    shape_tree(tree, recipe, mirror=mirror)
    copy_modules(unpacked, tree, release)
    extract_kernel(unpacked / f"boot/vmlinuz-{release}", work / KERNEL_FILE)
    modules = tree / "usr/lib/modules" / release
    busybox = tree / "usr/bin/busybox"
    make_initramfs(work / INITRAMFS_FILE, init=FILES / "initramfs-init", busybox=busybox, modules=modules)
    raw = work / "root.raw"
    _make_filesystem(raw, tree, recipe)
    pack(raw, work / ROOT_FILE)
    raw.unlink()
    names = (ROOT_FILE, KERNEL_FILE, INITRAMFS_FILE)
    manifest = Manifest(
        name=recipe.name,
        description=f"Debian 12 ({recipe.suite}), kernel {release}",
        architecture=recipe.architecture,
        os="debian-12",
        default_user=recipe.default_user,
        root_file=ROOT_FILE,
        min_disk_bytes=recipe.size_bytes,
        min_memory_bytes=MIN_MEMORY_BYTES,
        boot=Boot(kernel_file=KERNEL_FILE, initramfs_file=INITRAMFS_FILE, cmdline=recipe.cmdline),
        files=tuple(_described(work / name) for name in names),
        runs_workloads=True,
    )
    write_manifest(work, manifest)


def _make_filesystem(target: Path, tree: Path, recipe: Recipe) -> None:
    """ext4 filled by mkfs itself: no loop device, no mount. Its ids come from the recipe, not from chance."""
    identity = str(uuid.uuid5(uuid.NAMESPACE_OID, recipe.digest()))
    options = f"hash_seed={identity},lazy_itable_init=1,lazy_journal_init=1,root_owner=0:0"
    with target.open("wb") as stream:
        stream.truncate(recipe.size_bytes)
    run(["mkfs.ext4", "-q", "-F", "-L", "root", "-U", identity, "-m", "1", "-E", options, "-d", str(tree), str(target)])


def pack(raw: Path, target: Path) -> None:
    """As compressed qcow2: a third of the data and none of the holes, because every host gets a copy over SSH."""
    options = ["-c", "-m", "1", "-f", "raw", "-O", "qcow2", "-o", "compression_type=zstd"]
    run(["qemu-img", "convert", *options, str(raw), str(target)])


def _described(path: Path) -> ManifestFile:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return ManifestFile(name=path.name, sha256=digest, size_bytes=path.stat().st_size)


def summary(directory: Path) -> str:
    """One line a person may read."""
    manifest = json.loads((directory / MANIFEST).read_text())
    used = sum((directory / entry["name"]).stat().st_blocks * 512 for entry in manifest["files"])
    return f"{manifest['description']}: {directory} ({used >> 20} MiB on disk)"
