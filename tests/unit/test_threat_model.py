"""The threat model names only tests that are there, and says for every attacker what is promised and what is not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/security/threat-model.md").read_text()
_NAMED = re.compile(r"`(tests/[a-z_/]+\.py)(?:::(test_[a-z0-9_]+))?`")
ATTACKERS = (
    "A tenant's machine",
    "A tenant at the API",
    "A stolen key of a host",
    "A stolen database",
    "A malicious image or model file",
)


def _tests(path: Path) -> set[str]:
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, functions)}


def test_every_test_that_is_named_is_there() -> None:
    named = _NAMED.findall(PAGE)
    assert len(named) > 40
    files = {file for file, _ in named}
    assert [file for file in files if not (ROOT / file).exists()] == []
    there = {file: _tests(ROOT / file) for file in files}
    assert [f"{file}::{name}" for file, name in named if name and name not in there[file]] == []


def test_every_attacker_meets_promises_with_tests_and_what_is_not_promised() -> None:
    sections = {section.partition("\n")[0]: section for section in PAGE.split("\n## ")[1:]}
    assert tuple(sections) == ATTACKERS
    for title, section in sections.items():
        rows = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
        assert len(rows) >= 4, title
        assert [row for row in rows if not _NAMED.search(row.split(" | ")[1])] == [], title
        assert "\nNot promised: " in section, title
