"""The first process of a lab host: makes the host's view of the machine, then becomes its pid 1.

The one rule: standard library only and no import of ours, because it runs as a plain file inside the new namespaces.

The creator starts it inside fresh mount, pid, uts and ipc (and mostly net) namespaces. It answers with one line (its pid
as the machine sees it), waits for `go` on stdin (a creator that dies closes the pipe, and nothing is left), then mounts
and becomes init.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
CLONE_NEWCGROUP = 0x02000000
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

OVERLAID = ("etc", "usr")
FRESH = ("home", "opt", "root", "srv", "var")
EMPTY = ("media", "mnt")
DEVICES = (
    ("null", 1, 3, 0o666),
    ("zero", 1, 5, 0o666),
    ("full", 1, 7, 0o666),
    ("random", 1, 8, 0o666),
    ("urandom", 1, 9, 0o666),
    ("tty", 5, 0, 0o666),
)
COPIED_DEVICES = ("kvm", "fuse", "net/tun", "loop-control", "vhost-net", "vhost-vsock")
LOOP_DEVICES = 32

libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: Path, kind: str = "", flags: int = 0, data: str = "") -> None:
    target_bytes, data_bytes = str(target).encode(), data.encode() or None
    result = libc.mount(source.encode(), target_bytes, kind.encode() or None, ctypes.c_ulong(flags), data_bytes)
    _check(result, f"mount {kind or 'bind'} {source} on {target}")


def bind(source: Path, target: Path, *, recursive: bool = False) -> None:
    mount(str(source), target, flags=MS_BIND | (MS_REC if recursive else 0))


def take_name(name: str) -> None:
    """A name that exists once in a network namespace, and goes with pid 1, which inherits it. Whoever has it keeps it."""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(f"\0{name}")
    except OSError:
        return
    os.set_inheritable(held.detach(), True)


def join_cgroups(paths: list[str]) -> None:
    """Moves this process into its cgroup of every hierarchy, then makes those the roots it can see."""
    for path in paths:
        (Path(path) / "cgroup.procs").write_text("0")
    _check(libc.unshare(CLONE_NEWCGROUP), "unshare cgroup")


def make_root(root: Path, disk: Path) -> None:
    """The tree of the host: the machine's /usr and /etc under overlays, everything that changes from the host's own disk."""
    mount("none", Path("/"), flags=MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID, "mode=755,size=16m")
    for name in OVERLAID:
        layers = {part: disk / name / part for part in ("upper", "work")}
        for path in layers.values():
            path.mkdir(parents=True, exist_ok=True)
        (root / name).mkdir()
        mount("overlay", root / name, "overlay", 0, f"lowerdir=/{name},upperdir={layers['upper']},workdir={layers['work']}")
    for name in FRESH:
        (disk / name).mkdir(parents=True, exist_ok=True)
        (root / name).mkdir()
        bind(disk / name, root / name)
    for name in (*EMPTY, "proc", "sys", "dev", "run", "tmp", "boot", ".old"):
        (root / name).mkdir()
    for entry in Path("/").iterdir():
        if entry.is_symlink() and str(entry.readlink()).startswith("usr/"):
            (root / entry.name).symlink_to(entry.readlink())
    _fill_var(root / "var", disk)
    mount("tmpfs", root / "run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    mount("tmpfs", root / "tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    (root / "run/lock").mkdir(mode=0o1777)
    (root / "run/sshd").mkdir()


def _fill_var(var: Path, disk: Path) -> None:
    for name in ("cache/apt/archives/partial", "log", "spool", "lib/apt", "lib/misc", "lib/bedplate", "tmp", "mail"):
        (var / name).mkdir(parents=True, exist_ok=True)
    (var / "tmp").chmod(0o1777)
    for name, target in (("run", "/run"), ("lock", "/run/lock")):
        if not (var / name).is_symlink():
            (var / name).symlink_to(target)
    for name in ("dpkg", "apt", "pam"):
        lower, target = Path("/var/lib") / name, var / "lib" / name
        if not lower.is_dir():
            continue
        upper, work = disk / "overlay" / name / "upper", disk / "overlay" / name / "work"
        for path in (upper, work, target):
            path.mkdir(parents=True, exist_ok=True)
        mount("overlay", target, "overlay", 0, f"lowerdir={lower},upperdir={upper},workdir={work}")


def make_devices(dev: Path) -> None:
    devices = [(name, os.makedev(major, minor), stat.S_IFCHR | mode) for name, major, minor, mode in DEVICES]
    for name in COPIED_DEVICES:
        try:
            found = os.stat(f"/dev/{name}")  # noqa: PTH116 - the machine's own node, looked at once
        except OSError:
            continue
        devices.append((name, found.st_rdev, stat.S_IFCHR | 0o666 if name != "loop-control" else stat.S_IFCHR | 0o660))
    devices += [(f"loop{index}", os.makedev(7, index), stat.S_IFBLK | 0o660) for index in range(LOOP_DEVICES)]
    mount("tmpfs", dev, "tmpfs", MS_NOSUID, "mode=755,size=1m")
    for name, number, mode in devices:
        (dev / name).parent.mkdir(exist_ok=True)
        os.mknod(dev / name, mode, number)
        (dev / name).chmod(stat.S_IMODE(mode))
    for name, target in (
        ("fd", "/proc/self/fd"),
        ("stdin", "fd/0"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
        ("ptmx", "pts/ptmx"),
    ):
        (dev / name).symlink_to(target if target.startswith("/") or name == "ptmx" else f"/proc/self/{target}")
    for name in ("pts", "shm", "mqueue"):
        (dev / name).mkdir()
    mount("devpts", dev / "pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620,gid=5")
    mount("tmpfs", dev / "shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")


def make_kernel_views(root: Path, config: dict[str, Any]) -> None:
    """proc, sys and cgroups of these namespaces, and a boot id of the host's own (it changes with every boot)."""
    mount("proc", root / "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    boot_id = root / "run/init/boot_id"
    boot_id.parent.mkdir(mode=0o755)
    boot_id.write_text(config["boot_id"] + "\n")
    bind(boot_id, root / "proc/sys/kernel/random/boot_id")
    mount("sysfs", root / "sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    hierarchies = config["cgroups"]
    if not hierarchies:
        return
    base = root / "sys/fs/cgroup"
    if any(entry["at"] for entry in hierarchies):
        mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=755,size=1m")
    for entry in hierarchies:
        target = base / entry["at"] if entry["at"] else base
        target.mkdir(exist_ok=True)
        mount(entry["kind"], target, entry["kind"], MS_NOSUID | MS_NODEV | MS_NOEXEC, entry["options"])


def enter(root: Path) -> None:
    """pivot_root, then the machine's tree is out of sight."""
    os.chdir(root)
    number = SYS_PIVOT_ROOT[os.uname().machine]
    _check(libc.syscall(number, b".", b".old"), "pivot_root")
    os.chdir("/")
    _check(libc.umount2(b"/.old", MNT_DETACH), "umount the machine's tree")
    Path("/.old").rmdir()


def bring_up(commands: list[list[str]]) -> None:
    for argv in commands:
        subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    print(os.readlink("/proc/self"), flush=True)  # noqa: PTH115 - the machine's procfs: our pid as it sees us
    if sys.stdin.readline() != "go\n":
        raise SystemExit("the creator went away")
    if config["name_in_network"]:
        take_name(config["name_in_network"])
    root, disk = Path(config["root"]), Path(config["disk"])
    if config["cgroups"]:
        join_cgroups([entry["path"] for entry in config["cgroups"]])
    make_root(root, disk)
    make_devices(root / "dev")
    make_kernel_views(root, config)
    libc.sethostname(config["hostname"].encode(), len(config["hostname"]))
    enter(root)
    bring_up(config["network"])
    os.umask(0o022)
    log = os.open("/var/log/init.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    null = os.open("/dev/null", os.O_RDONLY)
    print("ready", flush=True)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    os.execve(config["init"][0], config["init"], environment)  # noqa: S606 - pid 1 is replaced, not started


if __name__ == "__main__":
    main()
