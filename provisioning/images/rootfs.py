"""The guest's root tree: a minimal Debian without what a guest never reads, and our few programs in it.

The one rule: whatever is put in here stands in the recipe, so that its digest names the image.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from provisioning.images.debian import run
from provisioning.images.recipe import FILES, PROGRAMS, Recipe

REMOVED = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/lintian",
    "usr/share/bash-completion",
    "usr/share/zoneinfo/right",
    "usr/share/zoneinfo/posix",
    "usr/share/common-licenses",
    "var/cache/apt",
    "var/cache/debconf",
    "var/lib/apt/lists",
    "var/log/apt",
    "var/log/bootstrap.log",
    "var/log/dpkg.log",
    "etc/machine-id",
)
BUSYBOX_COMMANDS = ("init", "poweroff", "reboot", "halt")
DPKG_EXCLUDES = """\
path-exclude=/usr/share/man/*
path-exclude=/usr/share/locale/*
path-exclude=/usr/share/doc/*
path-include=/usr/share/doc/*/copyright
"""


def shape_tree(tree: Path, recipe: Recipe, *, mirror: str) -> None:
    """Slims `tree`, and puts init, boot programs, sshd's configuration and the default user in it."""
    for name in REMOVED:
        path = tree / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for path in (tree / "usr/lib/python3.11", tree / "usr/lib/python3", tree / "usr/share/python3"):
        for cache in path.rglob("test"):
            shutil.rmtree(cache, ignore_errors=True)
    for name in ("var/cache/apt/archives/partial", "var/lib/apt/lists/partial", "var/lib/bedplate", "var/log"):
        (tree / name).mkdir(parents=True, exist_ok=True)
    _install_programs(tree)
    (tree / "etc/dpkg/dpkg.cfg.d/bedplate").write_text(DPKG_EXCLUDES)
    (tree / "etc/apt/sources.list").write_text(f"deb {mirror} {recipe.suite} main\n")
    (tree / "etc/fstab").write_text("/dev/vda / ext4 rw,noatime 0 1\n")
    (tree / "etc/hostname").write_text("guest\n")
    for key in (tree / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    user = recipe.default_user
    run(["chroot", str(tree), "useradd", "--create-home", "--shell", "/bin/bash", "--password", "*", "--uid", "1000", user])
    (tree / f"home/{user}/.ssh").mkdir(mode=0o700)
    run(["chroot", str(tree), "chown", f"{user}:", f"/home/{user}/.ssh"])


def _install_programs(tree: Path) -> None:
    programs = tree / "usr/lib/bedplate"
    programs.mkdir(exist_ok=True)
    for name, mode in PROGRAMS.items():
        shutil.copyfile(FILES / name, programs / name)
        (programs / name).chmod(mode)
    shutil.copyfile(FILES / "inittab", tree / "etc/inittab")
    shutil.copyfile(FILES / "sshd_config", tree / "etc/ssh/sshd_config")
    button = tree / "etc/acpi/PWRF"
    button.mkdir(parents=True)
    shutil.copyfile(FILES / "power-button", button / "00000080")
    (button / "00000080").chmod(0o755)
    for name in BUSYBOX_COMMANDS:
        link = tree / "usr/sbin" / name
        link.unlink(missing_ok=True)
        link.symlink_to("../bin/busybox")
