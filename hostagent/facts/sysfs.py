"""Small reads of /sys and /proc. The one rule: vendors put anything there, so every read may fail and every byte may be odd."""

from __future__ import annotations

from pathlib import Path

SYS = Path("/sys")
PROC = Path("/proc")


def text(path: Path, default: str = "") -> str:
    """Stripped text with odd bytes replaced; `default` when it cannot be read."""
    try:
        return path.read_bytes().decode(errors="replace").strip("\0 \n\t")
    except OSError:
        return default


def number(path: Path) -> int | None:
    """Decimal or 0x-hexadecimal; None when it is neither."""
    try:
        return int(text(path), 0)
    except ValueError:
        return None


def cpu_list(value: str) -> tuple[int, ...]:
    """`0-3,8` as numbers; () for anything else."""
    cpus: list[int] = []
    for part in value.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            return ()
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []
