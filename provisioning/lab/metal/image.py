"""Builds the disk of a fresh server once and keeps it: a Debian tree, its kernel, a package source on the disk itself.

The one rule: a directory in the cache is complete or absent. It is made under another name and renamed at the end.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from provisioning.images.build import default_cache
from provisioning.images.debian import BuildError, download_kernel, find_mirror, make_tree, private_apt, run
from provisioning.images.kernel import extract_kernel, release_of
from provisioning.lab.metal.recipe import Recipe

DISK_FILE, KERNEL_FILE = "disk.raw", "vmlinux"
SOURCE = Path("srv/packages")
KEPT = 2
REMOVED = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/info",
    "usr/share/locale",
    "var/cache/apt/archives",
    "var/log/bootstrap.log",
)


def directory_of(recipe: Recipe, cache: Path | None = None) -> Path:
    return (cache or default_cache()) / "servers" / f"{recipe.name}-{recipe.digest()[:16]}"


def find(recipe: Recipe | None = None, *, cache: Path | None = None) -> Path | None:
    """The finished directory, None when the cache has none."""
    found = directory_of(recipe or Recipe(), cache)
    return found if found.is_dir() else None


def build(
    recipe: Recipe | None = None,
    *,
    cache: Path | None = None,
    mirror: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """The directory with disk and kernel; built when the cache has none (some minutes). Needs root."""
    recipe = recipe or Recipe()
    finished = directory_of(recipe, cache)
    finished.parent.mkdir(parents=True, exist_ok=True)
    with (finished.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not finished.is_dir():
            if os.geteuid() != 0:
                raise BuildError("building a server's disk needs root (debootstrap and file ownership)")
            mirror = find_mirror(recipe.suite, mirror or os.environ.get("BEDPLATE_APT_MIRROR", ""))
            work = finished.with_name(f"{finished.name}.new")
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            try:
                _build(recipe, work, mirror, say)
                work.rename(finished)
                _forget_old(finished)
            except BaseException:
                shutil.rmtree(work, ignore_errors=True)
                raise
    return finished


def _forget_old(finished: Path) -> None:
    """Two recipes may be in use at a time; what older ones made is not needed again."""
    name = finished.name.rpartition("-")[0]
    found = [path for path in finished.parent.glob(f"{name}-*") if not path.name.endswith(".new")]
    for path in sorted(found, key=lambda path: path.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(path)


def _build(recipe: Recipe, work: Path, mirror: str, say: Callable[[str], None]) -> None:
    tree, scratch = work / "tree", work / "scratch"
    scratch.mkdir()
    say(f"debootstrap of {recipe.suite} ({len(recipe.installed)} packages and what they need)")
    make_tree(tree, suite=recipe.suite, mirror=mirror, packages=recipe.installed)
    say(f"packages that enrolment will bring: {', '.join(recipe.absent)}")
    _make_source(recipe, tree, scratch, mirror)
    say(f"kernel {recipe.kernel_package}")
    kernel = {"suite": recipe.suite, "mirror": mirror, "package": recipe.kernel_package, "architecture": recipe.architecture}
    unpacked = download_kernel(scratch, **kernel)
    release = release_of(unpacked)
    shutil.copytree(unpacked / "lib/modules" / release, tree / "usr/lib/modules" / release, symlinks=True)
    run(["depmod", "-b", str(tree), release])
    shutil.copyfile(unpacked / f"boot/vmlinuz-{release}", tree / f"boot/vmlinuz-{release}")
    extract_kernel(unpacked / f"boot/vmlinuz-{release}", work / KERNEL_FILE)
    _shape(tree, recipe)
    say("file system")
    disk = work / DISK_FILE
    with disk.open("wb") as stream:
        stream.truncate(recipe.size_bytes)
    options = "lazy_itable_init=1,lazy_journal_init=1,root_owner=0:0"
    run(["mkfs.ext4", "-q", "-F", "-L", "root", "-m", "1", "-E", options, "-d", str(tree), str(disk)])
    shutil.rmtree(tree)
    shutil.rmtree(scratch)


def _make_source(recipe: Recipe, tree: Path, scratch: Path, mirror: str) -> None:
    """A package source in a directory of the server, with what it lacks; it reaches no other one."""
    flags = private_apt(scratch / "apt", suite=recipe.suite, mirror=mirror, architecture=recipe.architecture)
    flags += ["-o", f"Dir::State::Status={tree / 'var/lib/dpkg/status'}"]
    run(["apt-get", "-q", *flags, "install", "--yes", "--download-only", "--no-install-recommends", *recipe.absent])
    source = tree / SOURCE
    source.mkdir(parents=True)
    stanzas = []
    for package in sorted((scratch / "apt/archives").glob("*.deb")):
        shutil.copyfile(package, source / package.name)
        digest = hashlib.sha256(package.read_bytes()).hexdigest()
        control = run(["dpkg-deb", "--field", str(package)]).rstrip()
        stanzas.append(f"{control}\nFilename: ./{package.name}\nSize: {package.stat().st_size}\nSHA256: {digest}\n")
    (source / "Packages").write_text("\n".join(stanzas))
    shutil.rmtree(scratch / "apt")
    shutil.rmtree(tree / "var/lib/apt/lists")  # as on many a fresh server: nobody has asked the mirror yet
    (tree / "var/lib/apt/lists/partial").mkdir(parents=True)
    (tree / "etc/apt/sources.list").write_text(f"deb [trusted=yes] file:/{SOURCE} ./\n")


def _shape(tree: Path, recipe: Recipe) -> None:
    for name in REMOVED:
        path = tree / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    (tree / "var/cache/apt/archives/partial").mkdir(parents=True)
    for key in (tree / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    (tree / "etc/ssh/sshd_config.d/server.conf").write_text(recipe.sshd)
    (tree / "etc/fstab").write_text("/dev/nvme0n1 / ext4 rw,noatime 0 1\n")
    (tree / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
    units = tree / "etc/systemd/system"
    for name in recipe.masked:
        (units / name).unlink(missing_ok=True)
        (units / name).symlink_to("/dev/null")
    run(["chroot", str(tree), "systemctl", "enable", "--quiet", "systemd-networkd.service", "ssh.service"])
    for name in ("machine-id", "hostname", "hosts"):  # the first boot's, and every server's own
        (tree / "etc" / name).unlink(missing_ok=True)
