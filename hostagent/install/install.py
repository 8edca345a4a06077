"""Carrying the steps out, and undoing them. The one rule: a step is in the manifest before it acts.

So a failure half-way leaves a host that `uninstall` cleans, and what was there before us is put back, not deleted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hostagent.install.commands import CommandFailed
from hostagent.install.layout import Layout
from hostagent.install.steps import Step, before_anything, steps
from hostagent.lib import files
from hostagent.lib.paths import Paths
from hostagent.protocol.enrol import ChangeLine, InstallPlan
from hostagent.protocol.errors import AgentError


def install(plan: InstallPlan, paths: Paths, archive: Path, *, is_dry_run: bool) -> Iterator[ChangeLine]:
    """Raises PlanRefused, and CommandFailed when the host cannot even be read; a failed step is the last line."""
    content = archive.read_bytes()
    layout = Layout(paths=paths, digest=hashlib.sha256(content).hexdigest())
    before_anything(layout)
    pending = steps(plan, layout, content)
    if is_dry_run:
        yield from (ChangeLine(change=step.change, state="planned") for step in pending)
        return
    manifest = Manifest(layout.manifest)
    for step in pending:
        manifest.add(step)
        try:
            step.act()
        except (OSError, CommandFailed, AgentError) as error:
            yield ChangeLine(change=step.change, state="failed", message=str(error))
            return
        manifest.save()
        yield ChangeLine(change=step.change, state="done")


class Manifest:
    """Every change made on this host, oldest first, each once; the oldest `before` of a thing is the one that counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries: list[dict[str, Any]] = []
        if path.is_file():
            self.entries = json.loads(path.read_bytes())

    def add(self, step: Step) -> None:
        """On disk afterwards, once its directory exists: the first steps make that."""
        change = step.change
        if any((entry["kind"], entry["subject"]) == (change.kind, change.subject) for entry in self.entries):
            return
        self.entries.append({**asdict(change), "before": step.before})
        self.save()

    def save(self) -> None:
        if self._path.parent.is_dir():
            files.write_atomically(self._path, json.dumps(self.entries, indent=1).encode())
