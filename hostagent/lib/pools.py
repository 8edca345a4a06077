"""Where volumes and snapshots lie on this host: `primary` below the agent's own state, others on disks that the operator names.

```toml
# /etc/bedplate/storage.toml; read anew each time
[pools.backup]
path = "/mnt/backup"           # a file system's directory that machines' users may pass through
```

The one rule: a pool is known by a mark on its disk, so that the empty directory of a disk that is not mounted is never taken
for an empty pool. What lies in another pool has a symbolic link where it would lie in the primary one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hostagent.lib import files
from hostagent.lib.paths import Paths
from hostagent.protocol.errors import AgentError

PRIMARY = "primary"
MARK = ".bedplate-pool"
LOW_RATIO = 0.1
_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}[a-z0-9]")
Kind = Literal["volume", "snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """`is_available`: its disk is there. Sizes in bytes, 0 where it is not."""

    name: str
    path: Path
    is_available: bool
    total_bytes: int = 0
    free_bytes: int = 0

    @property
    def is_low(self) -> bool:
        return self.is_available and self.free_bytes < self.total_bytes * LOW_RATIO


def all_of(paths: Paths) -> tuple[Pool, ...]:
    """The primary one first. One that is named for the first time gets its mark."""
    named = {PRIMARY: paths.state} | declared(paths)[0]
    return tuple(_looked_at(paths, name, path) for name, path in named.items())


def declared(paths: Paths) -> tuple[dict[str, Path], tuple[str, ...]]:
    """The operator's pools, and what in the file nobody understands."""
    config = paths.config / "storage.toml"
    try:
        values: dict[str, Any] = tomllib.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, ()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        return {}, (f"{config}: {error}",)
    found, unknown = {}, [f"storage.{name}" for name in values if name != "pools"]
    tables = values.get("pools")
    for name, table in (tables if isinstance(tables, dict) else {}).items():
        path = table.get("path") if isinstance(table, dict) and set(table) == {"path"} else None
        if isinstance(path, str) and path.startswith("/") and _NAME.fullmatch(name) and name != PRIMARY:
            found[name] = Path(path)
        else:
            unknown.append(f"storage.pools.{name}")
    return found, tuple(unknown)


def place(paths: Paths, kind: Kind, object_id: str, pool: str) -> None:
    """Where its data will lie. Raises AgentError `volume.pool_missing` (retryable), and `volume.unsupported` (not retryable)
    for what lies in another pool already: nothing is moved.
    """
    link = paths.state / kind / object_id
    if link.is_symlink() or link.exists():
        check(paths, kind, object_id)
        if (here := pool_of(paths, kind, object_id)) != (pool or PRIMARY):
            raise AgentError("volume.unsupported", f"{object_id} lies in pool {here} and is not moved", retryable=False)
        return
    if pool in ("", PRIMARY):
        return
    found = next((one for one in all_of(paths) if one.name == pool), None)
    if found is None or not found.is_available:
        raise AgentError("volume.pool_missing", f"the disk of pool {pool} is not there", pool=pool)
    target = found.path / kind / object_id
    target.mkdir(parents=True, exist_ok=True, mode=0o755)
    files.sync_directory(target.parent)
    link.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    link.symlink_to(target)
    files.sync_directory(link.parent)


def check(paths: Paths, kind: Kind, object_id: str) -> None:
    """Raises AgentError `volume.pool_missing` where its data is on a disk that is not there."""
    link = paths.state / kind / object_id
    if link.is_symlink() and not link.is_dir():
        raise AgentError("volume.pool_missing", f"the disk with {link.readlink()} is not there")


def pool_of(paths: Paths, kind: Kind, object_id: str) -> str:
    """In which pool it lies."""
    link = paths.state / kind / object_id
    if not link.is_symlink():
        return PRIMARY
    root = link.readlink().parents[1]
    return next((name for name, path in declared(paths)[0].items() if path == root), str(root))


def _looked_at(paths: Paths, name: str, path: Path) -> Pool:
    place_ = path
    while name == PRIMARY and not place_.exists():
        place_ = place_.parent
    if name != PRIMARY and not _is_marked(paths, name, path):
        return Pool(name=name, path=path, is_available=False)
    space = shutil.disk_usage(place_)
    return Pool(name=name, path=path, is_available=True, total_bytes=space.total, free_bytes=space.free)


def _is_marked(paths: Paths, name: str, path: Path) -> bool:
    record, mark = paths.state / "pools" / f"{name}.json", path / MARK
    try:
        known = json.loads(record.read_bytes())
        return known == {"path": str(path), "mark": mark.read_text(encoding="ascii")}
    except (OSError, ValueError):
        if record.exists() or not path.is_dir() or not os.access(path, os.W_OK):
            return False
    content = mark.read_text(encoding="ascii") if mark.exists() else uuid.uuid4().hex
    files.write_atomically(mark, content.encode(), mode=0o644)
    files.write_atomically(record, json.dumps({"path": str(path), "mark": content}).encode())
    return True
