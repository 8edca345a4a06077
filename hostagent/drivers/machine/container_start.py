"""The first program of a container's unit: makes its network namespace and root, then becomes runc.

The one rule: what it mounts and makes lives in namespaces of its own, so it is gone with the container, however that ends.

`python -m hostagent.drivers.machine.container_start SPEC`: SPEC is a JSON file with `lower` (the root tree), `scratch` (a
directory that takes what is written), `root` (where both are seen as one), `uid`, `gid`, `nics` (see
`container_config.network_setup`) and `runc` (argv).
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

CLONE_NEWNS = 0x0002_0000
CLONE_NEWNET = 0x4000_0000
IP = "/usr/sbin/ip"
MOUNT = "/usr/bin/mount"
COMMAND_SECONDS = 20


def main(arguments: list[str]) -> int:
    spec = json.loads(Path(arguments[0]).read_bytes())
    _enter_network(spec["nics"])
    _unshare(CLONE_NEWNS)
    _run([MOUNT, "--make-rprivate", "/"])
    # a user namespace may mount proc only where one is wholly in sight; the host's may have something mounted over it
    _run([MOUNT, "-t", "proc", "proc", "/proc", "-o", "nosuid,nodev,noexec"])
    _mount_root(spec)
    os.execv(spec["runc"][0], spec["runc"])  # noqa: S606 - the unit becomes runc


def _enter_network(nics: list[dict[str, Any]]) -> None:
    """A helper stays outside and gives us the far ends of the veths once we are in the new namespace."""
    reader, writer = os.pipe()
    ours = os.getpid()
    helper = os.fork()
    if helper == 0:
        os.close(writer)
        os.read(reader, 1)
        code = 0
        for nic in nics:
            code |= subprocess.run([IP, "link", "set", "dev", nic["peer"], "netns", str(ours)], check=False).returncode
        os._exit(min(code, 1))
    os.close(reader)
    _unshare(CLONE_NEWNET)
    os.write(writer, b".")
    os.close(writer)
    if os.waitpid(helper, 0)[1] != 0:
        raise SystemExit("a nic cannot be moved into the container")
    lines = ["link set dev lo up", *(line for nic in nics for line in nic["lines"])]
    _run([IP, "-batch", "-"], "".join(f"{line}\n" for line in lines))


def _mount_root(spec: dict[str, Any]) -> None:
    """A fresh scratch layer at every start; no device of the tree can be opened, no set-uid bit counts."""
    scratch = Path(spec["scratch"])
    shutil.rmtree(scratch, ignore_errors=True)
    upper, work = scratch / "upper", scratch / "work"
    upper.mkdir(parents=True)
    work.mkdir()
    os.chown(upper, spec["uid"], spec["gid"])
    upper.chmod(0o755)
    temporary = upper / "tmp"  # runc gives a tmpfs the mode of the directory below it
    temporary.mkdir()
    os.chown(temporary, spec["uid"], spec["gid"])
    temporary.chmod(0o1777)
    Path(spec["root"]).mkdir(exist_ok=True)
    options = f"nodev,nosuid,lowerdir={spec['lower']},upperdir={upper},workdir={work}"
    _run([MOUNT, "-t", "overlay", "overlay", "-o", options, spec["root"]])


def _unshare(flags: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"unshare: {os.strerror(number)}")


def _run(argv: list[str], stdin: str = "") -> None:
    subprocess.run(argv, input=stdin, text=True, check=True, timeout=COMMAND_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
