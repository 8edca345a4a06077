"""The list of the agent's error codes is whole: every code in its sources is explained, and nothing else is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
RAISERS = {"AgentError", "StartError", "_failed", "_refuse", "Failed", "UploadResult"}
CODE = re.compile(r"[a-z]+\.[a-z_]+|busy|cancelled")


def codes_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name in RAISERS:
                values = [*node.args[:2], *(keyword.value for keyword in node.keywords if keyword.arg == "code")]
                for value in values:
                    if isinstance(value, ast.Constant) and isinstance(value.value, str) and CODE.fullmatch(value.value):
                        yield value.value


def test_every_code_is_explained() -> None:
    sources = [*(ROOT / "hostagent").rglob("*.py"), *(ROOT / "controlplane/remote").rglob("*.py")]
    raised = {code for path in sources for code in codes_in(ast.parse(path.read_text()))}
    page = (ROOT / "docs/reference/agent-errors.md").read_text()
    explained = re.findall(r"^\| `([a-z._]+)` \| (?:yes|no) \|", page, re.MULTILINE)
    assert len(explained) == len(set(explained))
    assert raised - set(explained) == set(), "explain these in docs/reference/agent-errors.md"
    assert set(explained) - raised == set(), "nobody raises these"
