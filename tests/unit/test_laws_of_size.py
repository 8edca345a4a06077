"""Architecture, section 9: what is long or takes much says why in its docstring, or is split.

`Long, because …` and `Many parameters, because …` are the words. Blank lines and comments count: they are read too.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 400
MAX_PROGRAM_LINES = 600
MAX_FUNCTION_LINES = 40
MAX_PARAMETERS = 6
LONG = "Long, because"
MANY = "Many parameters,"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> list[Path]:
    """What is in the repository or about to be; generated migrations are not written by hand."""
    argv = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", "*.py"]
    listed = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.split() or [str(path.relative_to(ROOT)) for path in ROOT.glob("[a-z]*/**/*.py")]
    return [ROOT / name for name in names if not name.startswith("migrations/versions/") and (ROOT / name).exists()]


def said(node: ast.AST) -> str:
    """The docstring, its lines joined."""
    found = ast.get_docstring(node) if isinstance(node, Function | ast.Module) else None
    return " ".join((found or "").split())


def lines_of(function: Function, *, is_command: bool) -> int:
    """From `def` to the end. The options of a command are its signature, so there the body alone counts."""
    first = function.body[0].lineno if is_command else function.lineno
    return (function.end_lineno or first) - first + 1


def parameters_of(function: Function) -> int:
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def offences(path: Path, text: str) -> Iterator[str]:
    tree, parts = ast.parse(text), path.parts
    is_command, is_test = "cli" in parts, "tests" in parts
    most = MAX_PROGRAM_LINES if path.name in {"program.py", "reconcile.py"} else MAX_FILE_LINES
    if text.count("\n") > most and LONG not in said(tree):
        yield f"{path} has {text.count(chr(10))} lines; {most} are the limit"
    for node in ast.walk(tree):
        if not isinstance(node, Function):
            continue
        lines = lines_of(node, is_command=is_command)
        if lines > MAX_FUNCTION_LINES and LONG not in said(node):
            yield f"{path}:{node.lineno} {node.name} has {lines} lines; {MAX_FUNCTION_LINES} are the limit"
        parameters = parameters_of(node)
        if parameters > MAX_PARAMETERS and not is_command and not is_test and MANY not in said(node):
            yield f"{path}:{node.lineno} {node.name} has {parameters} parameters; {MAX_PARAMETERS} are the limit"


def test_what_is_long_or_takes_much_says_why() -> None:
    found = [words for path in sources() for words in offences(path.relative_to(ROOT), path.read_text())]
    assert not found, "split it, or say `Long, because …` (`Many parameters, because …`) in the docstring:\n" + "\n".join(found)


BODY = "    x = 1\n" * 40
SEVEN = "a, b, c, d, e, f, g"


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("a/b.py", "x = 1\n" * 401, 1),
        ("a/b.py", '"""Long, because so."""\n' + "x = 1\n" * 401, 0),
        ("a/program.py", "x = 1\n" * 401, 0),
        ("a/program.py", "x = 1\n" * 601, 1),
        ("a/b.py", f"def f():\n{BODY}", 1),
        ("a/b.py", f'async def f():\n    """Long, because\n    so."""\n{BODY}', 0),
        ("a/cli/b.py", f"def f(\n    a,\n):\n{BODY}", 0),
        ("a/b.py", f"def f(a, *, b, c, d, e, f, g):\n    x = 1\nclass A:\n    def f(self, {SEVEN[3:]}): ...\n", 1),
        ("a/b.py", f'def f({SEVEN}):\n    """Many parameters, because so."""\n', 0),
        ("tests/b.py", f"def f({SEVEN}):\n    x = 1\n", 0),
    ],
)
def test_the_law_sees_what_it_should(name: str, text: str, count: int) -> None:
    assert len(list(offences(Path(name), text))) == count
