"""Laws 1 and 8: one noun, one folder, the same file names; errors are types with stable dotted codes."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import controlplane
from controlplane import resources
from controlplane.core.errors import BedplateError

ROOT = Path(next(iter(controlplane.__path__)))
NOUNS = sorted(module.name for module in pkgutil.iter_modules(resources.__path__))
STANDARD = {"__init__", "routes", "schemas", "service", "queries", "program", "reconcile", "errors"}
MORE = {  # what a noun holds besides; a new file here needs a reason
    # How many replicas for which load; VM or container, and why; what replicas are made of, and how that is exchanged.
    "endpoint": {"autoscale", "isolation", "revision", "rolling", "rollout"},
    "firewall": {"rule"},  # pure: which rules say the same, or the opposite
    "host": {"artifacts", "bgp", "conditions", "keys", "learned"},  # what is shipped; SSH keys; what facts mean
    "image": {"copies", "fetch", "store"},  # which hosts hold it; files by URL; the files themselves
    # what an edge is told; named timeouts; pure: counters and rates; how clients' addresses are kept
    "loadbalancer": {"document", "profile", "traffic", "ways"},
    "key": {"publish"},  # the gateways' copy
    "model": {"catalogue", "plan"},  # the YAML files; pure: what a replica is and needs
    "replica": {"probe"},  # does it serve the model?
    "network": {"allocate", "mesh"},  # pure: arithmetic of prefixes; which host reaches which by what way
    "storage_pool": {"layers"},  # what volumes and snapshots are made of holds the pool's room
    "project": {"keys"},  # the key over the keys of its volumes
    "session": {"sso"},  # who a provider says one is, and what that gives
    "volume": {"conditions", "document"},  # pure
    "vm": {"conditions", "document", "guards", "request"},  # pure, but for what must be told before a start
}
CODE = re.compile(r"[a-z]+(_[a-z]+)*(\.[a-z0-9]+(_[a-z0-9]+)*)?")


@pytest.mark.parametrize("noun", NOUNS)
def test_law_1_a_noun_has_the_usual_files(noun):
    files = {path.stem for path in (ROOT / "resources" / noun).glob("*.py")}
    assert files - STANDARD - MORE.get(noun, set()) == set(), "give it one of the usual names, or say here why not"
    if "routes" in files:
        assert {"schemas", "errors"} <= files
    assert not {"program", "reconcile"} <= files or noun in {"loadbalancer", "endpoint", "image", "vm", "host", "replica"}


@pytest.mark.parametrize("noun", NOUNS)
def test_law_1_no_file_is_called_a_drawer(noun):
    names = {part for path in (ROOT / "resources" / noun).rglob("*.py") for part in path.stem.split("_")}
    assert not names & {"utils", "util", "helpers", "helper", "common", "manager", "misc"}


def error_types() -> list[type[BedplateError]]:
    for found in pkgutil.walk_packages(controlplane.__path__, "controlplane."):
        if found.name.rpartition(".")[2] == "errors" and ".cli" not in found.name:
            importlib.import_module(found.name)
    pending, seen = [BedplateError], []
    while pending:
        kind = pending.pop()
        if kind.__module__.startswith("controlplane."):
            seen.append(kind)
        pending += kind.__subclasses__()
    return seen


def test_law_8_codes_are_dotted_unique_and_explained():
    owners: dict[str, type[BedplateError]] = {}
    for kind in error_types():
        assert "code" in vars(kind), f"{kind.__qualname__} has no code of its own"
        assert CODE.fullmatch(kind.code), kind.code
        assert owners.setdefault(kind.code, kind) is kind, f"{kind.code} has two types"
        assert kind.__doc__, f"{kind.__qualname__} does not say what it means"
        assert 400 <= kind.status < 600
        parts = kind.__module__.split(".")
        if parts[1] == "resources":
            assert kind.code.split(".")[0] in {parts[2], *_also(parts[2])}, f"{kind.code} is not the noun's"


def _also(noun: str) -> set[str]:
    """First words of codes that a noun shares with a cross-cutting part."""
    return {"nic": {"network"}, "vm": {"placement"}, "placement": {"vm"}}.get(noun, set())


def test_law_8_errors_live_in_errors_py_and_nobody_raises_http_statuses():
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "HTTPException":
                pytest.fail(f"{path}:{node.lineno} raises an HTTP status instead of an error type")
            if isinstance(node, ast.ClassDef) and path.name != "errors.py" and "cli" not in path.parts:
                targets = [getattr(item.targets[0], "id", "") for item in node.body if isinstance(item, ast.Assign)]
                is_error = "code" in targets and "status" in targets
                assert not is_error or path.parts[-2:] == ("core", "paging.py"), f"{path}:{node.lineno} belongs in errors.py"
