"""Packages leave with the agent that brought them, unless somebody else needs them by now."""

from __future__ import annotations

import pytest

from hostagent.install import uninstall

SIMULATED = {
    "qemu-utils": "Purg qemu-utils [1:7.2]\n",
    "libfuse3-3": "Purg ntfs-3g [1:2022]\nPurg qemu-utils [1:7.2]\nPurg libfuse3-3 [3.14]\n",
}


@pytest.fixture
def purged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def command(*argv: str, seconds: float = 0, check: bool = True) -> str:
        del seconds, check
        match argv:
            case ("dpkg-query", *_, name):
                return "installed" if name in SIMULATED else ""
            case ("apt-get", "purge", "--simulate", "--yes", *names):
                return "".join(SIMULATED[name] for name in names)
            case ("apt-get", "purge", "--yes", *names):
                found.extend(names)
                return ""
            case other:
                raise AssertionError(other)

    monkeypatch.setattr(uninstall, "command", command)
    return found


def test_what_others_need_by_now_stays(purged: list[str]):
    ours = frozenset(SIMULATED)
    assert uninstall.remove_package("libfuse3-3", ours) == "kept: ntfs-3g would go with it"
    assert uninstall.remove_package("qemu-utils", ours) == ""
    assert uninstall.remove_package("gone-already", ours) == ""
    assert purged == ["qemu-utils"]


def test_what_only_ours_need_goes_with_them(purged: list[str]):
    assert uninstall.remove_package("libfuse3-3", frozenset({*SIMULATED, "ntfs-3g"})) == ""
    assert purged == ["libfuse3-3"]


def test_all_leave_together_where_nobody_else_needs_one(purged: list[str]):
    uninstall.remove_together(frozenset({*SIMULATED, "gone-already"}))
    assert purged == [], "ntfs-3g would go with them"
    uninstall.remove_together(frozenset({*SIMULATED, "ntfs-3g"}))
    assert purged == ["libfuse3-3", "qemu-utils"]
