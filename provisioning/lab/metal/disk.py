"""A server's own disk: a copy of the fresh one with what makes it this server written into its file system.

The one rule: no mount and no loop device; `debugfs` of e2fsprogs writes the few files (debugfs(8)).
"""

from __future__ import annotations

import subprocess
import uuid
from pathlib import Path

from provisioning.lab.model import LabError
from provisioning.lab.network import run

HOST_KEY = "ssh_host_ed25519_key"
COPY_SECONDS = 120


def prepare_disk(directory: Path, fresh: Path, disk: Path, name: str, network: str) -> None:
    """Also makes the keys below `directory`/ssh: the server's own, and one that may log in as root."""
    keys, staged = directory / "ssh", directory / "staged"
    for path in (keys, staged):
        path.mkdir(mode=0o700, exist_ok=True)
    for key, comment in ((HOST_KEY, name), ("id_ed25519", "lab")):
        if not (keys / key).exists():
            run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(keys / key)])
    address = network.partition("Address=")[2].partition("/")[0]
    public = (keys / f"{HOST_KEY}.pub").read_text()
    (keys / "known_hosts").write_text(f"{address} {public}")
    texts = {
        "/etc/hostname": (f"{name}\n", 0o644),
        "/etc/hosts": (f"127.0.0.1 localhost\n::1 localhost\n{address} {name}\n", 0o644),
        "/etc/machine-id": (f"{uuid.uuid4().hex}\n", 0o444),
        "/etc/systemd/network/10-uplink.network": (network, 0o644),
        f"/etc/ssh/{HOST_KEY}": ((keys / HOST_KEY).read_text(), 0o600),
        f"/etc/ssh/{HOST_KEY}.pub": (public, 0o644),
        "/root/.ssh/authorized_keys": ((keys / "id_ed25519.pub").read_text(), 0o600),
    }
    work = disk.with_suffix(".new")
    _copy(fresh, work)
    _write(work, staged, texts)
    work.rename(disk)


def _copy(fresh: Path, target: Path) -> None:
    argv = ["cp", "--reflink=auto", "--sparse=always", str(fresh), str(target)]
    done = subprocess.run(argv, check=False, capture_output=True, timeout=COPY_SECONDS, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise LabError(f"{target}: {done.stderr.decode(errors='replace').strip()}")


def _write(disk: Path, staged: Path, texts: dict[str, tuple[str, int]]) -> None:
    commands = []
    for index, (path, (text, mode)) in enumerate(texts.items()):
        source = staged / str(index)
        source.write_text(text)
        commands.append(f"write {source} {path}")
        commands += [f"set_inode_field {path} {field}" for field in (f"mode 0100{mode:o}", "uid 0", "gid 0")]
    script = staged / "commands"
    script.write_text("\n".join(commands) + "\n")
    said = run(["debugfs", "-w", "-f", str(script), str(disk)])
    complaints = [line for line in said.stderr.splitlines() if line.strip() and not line.startswith("debugfs ")]
    if complaints:
        raise LabError(f"{disk}: debugfs: {'; '.join(complaints[:3])}")
