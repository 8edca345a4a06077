"""Law 4, on the AST: no call to a host inside a transaction of a step, in any program or reconciler."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

RESOURCES = Path(__file__).resolve().parents[2] / "controlplane/resources"
TRANSACTIONS = {"tx", "raw_tx", "session"}
OUTSIDE = {"host", "hosts", "store"}


def _names(node: ast.expr) -> Iterator[str]:
    """The names of a dotted expression, inside out: `self.world.hosts.ensure` gives ensure, hosts, world, self."""
    while isinstance(node, ast.Attribute | ast.Call):
        if isinstance(node, ast.Attribute):
            yield node.attr
            node = node.value
        else:
            node = node.func
    if isinstance(node, ast.Name):
        yield node.id


def _is_transaction(item: ast.withitem) -> bool:
    call = item.context_expr
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in TRANSACTIONS


def calls_inside_transactions(source: str) -> list[int]:
    """Lines where a host, or a store of large files, is called lexically inside `async with self.tx()`, or `raw_tx`, or a
    session's block.
    """
    found = []
    for block in ast.walk(ast.parse(source)):
        if not isinstance(block, ast.AsyncWith) or not any(_is_transaction(item) for item in block.items):
            continue
        for statement in block.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and OUTSIDE.intersection(list(_names(node.func))[1:]):
                    found.append(node.lineno)
    return sorted(set(found))


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("async with self.tx() as tx:\n    await self.host.ensure(x)", [2]),
        ("async with self.raw_tx() as tx:\n    if y:\n        r = await self.world.hosts.call(h, 'v', b)", [3]),
        ("async with self.world.database.session() as s:\n    await self.world.hosts.purge(h)", [2]),
        ("async with self.tx() as tx:\n    for x in y:\n        store.remove(x)", [3]),
        (
            "async with self.tx() as tx:\n    host = await tx.session.get(Host, i)\n    host.x = 1\nawait self.host.ensure(x)",
            [],
        ),
        ("async with self.lock():\n    await self.host.ensure(x)", []),
    ],
)
def test_the_lint_sees_what_it_should(source: str, lines: list[int]) -> None:
    indented = "\n".join(f"    {line}" for line in source.splitlines())
    assert calls_inside_transactions(f"async def step(self):\n{indented}") == [line + 1 for line in lines]


def test_no_network_inside_a_transaction() -> None:
    paths = sorted([*RESOURCES.glob("*/program.py"), *RESOURCES.glob("*/reconcile.py")])
    offences = [
        f"{path.parent.name}/{path.name}:{line}" for path in paths for line in calls_inside_transactions(path.read_text())
    ]
    assert not offences, f"a host is called inside a transaction: {', '.join(offences)}"
