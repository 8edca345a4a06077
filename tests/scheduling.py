"""The order of a run, and how it is shared out among several processes (`-n`): by files, so that what a file's tests share
is made once.

The one rule: what takes long comes first, so that no process waits for another at the end. Tests of machines wait a lot;
beside them the others use the cores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

_METAL = "tests/metal/"
_GATEWAY = tuple(f"tests/system/test_{name}.py" for name in ("demo", "endpoint", "vm", "lab"))
_FIRST = (_GATEWAY, "tests/system/", "tests/programs/", _METAL, "tests/conformance/", "tests/agent/")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In one process metal comes after all other tests; in several when the disk of its server has been built meanwhile."""
    items.sort(key=_rank if hasattr(config, "workerinput") else _is_metal)


def _is_metal(item: pytest.Item) -> bool:
    return item.nodeid.startswith(_METAL)


def _rank(item: pytest.Item) -> int:
    return next((rank for rank, begin in enumerate(_FIRST) if item.nodeid.startswith(begin)), len(_FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        """Tests on metal share one server, and a machine has room for one gateway: one process for each."""

        def _split_scope(self, nodeid: str) -> str:
            return next((begin[0] for begin in ((_METAL,), _GATEWAY) if nodeid.startswith(begin)), nodeid.partition("::")[0])

    config.option.loadscopereorder = False
    return ByFile(config, log)
