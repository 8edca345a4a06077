"""What enrolment says: the preflight report, the plan of an installation, and its changes as data.

The one rule: `--dry-run` prints the very list that the real run carries out, because both come from the same function.

`agent.pyz preflight [--json] [--plan FILE]` prints a PreflightReport (as text without `--json`).
`agent.pyz install --plan FILE [--dry-run]` reads an InstallPlan as JSON and prints one ChangeLine a line.
`agent.pyz uninstall [--dry-run]` prints ChangeLines too. Exit codes: 0 done, 1 failed (the last line says why), 2 usage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hostagent.protocol.facts import HostFacts

ChangeKind = Literal["package", "user", "directory", "file", "link", "sysctl", "unit", "kernel_argument", "nft_table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallPlan:
    """`authorized_key`: the control plane's public key (`ssh-ed25519 AAAA…`), which may speak the protocol and nothing else.

    `packages`: names of the distribution's packages; those already there stay unmarked. `config`: keys of
    /etc/bedplate/host.toml, written when the file is absent (what an operator declared stays). `fallbacks`: packages that
    stand in for a link kind that the kernel lacks (`{"wireguard-go": "wireguard"}`).
    """

    authorized_key: str
    packages: tuple[str, ...] = ()
    config: dict[str, str | int] = field(default_factory=dict)
    fallbacks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Change:
    """One thing that becomes different. `subject`: a package, path, sysctl or unit name; `detail`: for people."""

    kind: ChangeKind
    subject: str
    action: Literal["create", "change", "remove"] = "create"
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeLine:
    """`planned` in a dry run; `done` or `failed` in a real one. The first `failed` is the last line."""

    change: Change
    state: Literal["planned", "done", "failed"]
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """`why` says what was found, `fix` what to do about it ("" when nothing is to be done)."""

    name: str
    result: Literal["ok", "warn", "fail"]
    why: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightReport:
    """`is_fit`: no check failed."""

    is_fit: bool
    checks: tuple[Check, ...]
    facts: HostFacts
