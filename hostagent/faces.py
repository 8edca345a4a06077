"""Every face but `dispatch`: arguments in, an exit code out."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from hostagent import version
from hostagent.lib import hostconfig
from hostagent.lib.lock import AlreadyLocked
from hostagent.lib.paths import Paths
from hostagent.protocol import codec
from hostagent.protocol.enrol import ChangeLine


def run(face: str, arguments: list[str]) -> int:
    table = {
        "serve": _serve,
        "supervise": _supervise,
        "facts": _facts,
        "preflight": _preflight,
        "install": _install,
        "uninstall": _uninstall,
        "supervisor": _supervisor,
        "storage": _storage,
        "rules-helper": _rules_helper,
        "xts-helper": _xts_helper,
        "version": _version,
    }
    if face not in table:
        print(f"there is no face {face!r}", file=sys.stderr)
        return 2
    return table[face](arguments)


def _parser(face: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"agent.pyz {face}")
    parser.add_argument("--root", type=Path, help="keep everything below this directory instead of the normal paths")
    return parser


def _paths(options: argparse.Namespace) -> Paths:
    return Paths.under(options.root) if options.root else Paths()


def _serve(arguments: list[str]) -> int:
    from hostagent.serve import service

    parser = _parser("serve")
    parser.add_argument("--interval", type=float, default=service.INTERVAL_SECONDS, help="seconds between two full looks")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(service.run(_paths(options), version=version.version(), interval_seconds=options.interval))
    except AlreadyLocked as error:
        print(f"another agent serves this host: {error}", file=sys.stderr)
        return 1
    return 0


def _supervise(arguments: list[str]) -> int:
    """The plain supervisor's daemon, where PID 1 is not systemd: a service of the host beside `serve`."""
    from hostagent.drivers.supervisor import init

    return init.main(arguments)


def _facts(arguments: list[str]) -> int:
    from hostagent.facts.host import Learner

    parser = _parser("facts")
    parser.add_argument("--no-kvm-probe", action="store_true")
    options = parser.parse_args(arguments)
    paths = _paths(options)
    learner = Learner(paths, hostconfig.load(paths.host_config), None, version.version())
    if options.no_kvm_probe:
        from hostagent.facts.kvm import not_probed

        learner.kvm_probe = not_probed
    print(json.dumps(codec.encode(asyncio.run(learner.learn())), indent=2))
    return 0


def _preflight(arguments: list[str]) -> int:
    from hostagent.install.preflight import preflight, report_text
    from hostagent.protocol.enrol import InstallPlan

    parser = _parser("preflight")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plan", type=Path)
    options = parser.parse_args(arguments)
    plan = codec.decode(InstallPlan, json.loads(options.plan.read_bytes())) if options.plan else None
    report = asyncio.run(preflight(_paths(options), plan, version.version()))
    print(json.dumps(codec.encode(report)) if options.json else report_text(report))
    return 0 if report.is_fit else 1


def _install(arguments: list[str]) -> int:
    from hostagent.install.commands import CommandFailed
    from hostagent.install.install import install
    from hostagent.install.steps import PlanRefused
    from hostagent.protocol.enrol import InstallPlan

    parser = _parser("install")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    archive = version.archive()
    if archive is None:
        print("only the agent's own file installs itself", file=sys.stderr)
        return 2
    try:
        plan = codec.decode(InstallPlan, json.loads(options.plan.read_bytes()))
        return _print_lines(install(plan, _paths(options), archive, is_dry_run=options.dry_run))
    except (OSError, ValueError, PlanRefused, CommandFailed) as error:
        print(error, file=sys.stderr)
        return 1


def _uninstall(arguments: list[str]) -> int:
    from hostagent.install.uninstall import uninstall

    parser = _parser("uninstall")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument(
        "--delete-copy", action="store_true", help="delete this very file at the end; leave it to another that is at it"
    )
    options = parser.parse_args(arguments)
    try:
        return _print_lines(uninstall(_paths(options), is_dry_run=options.dry_run, can_wait=not options.delete_copy))
    finally:
        archive = version.archive()
        if options.delete_copy and archive is not None:
            shutil.rmtree(archive.parent, ignore_errors=True)


def _print_lines(lines: Iterator[ChangeLine]) -> int:
    code = 0
    for line in lines:
        code = 1 if line.state == "failed" else code
        print(json.dumps(codec.encode(line)), flush=True)
    return code


def _supervisor(arguments: list[str]) -> int:
    from hostagent.drivers.supervisor.init import Init

    options = _parser("supervisor").parse_args(arguments)
    os.umask(0o022)
    asyncio.run(Init(_paths(options).run).main())
    return 0


def _storage(arguments: list[str]) -> int:
    """The volumes of this host, without service and control plane. 1 where one is not as it should be."""
    from hostagent.drivers.storage.verify import text, verify

    parser = _parser("storage")
    parser.add_argument("what", choices=["verify"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    found = asyncio.run(verify(_paths(options)))
    print(json.dumps([codec.encode(one) for one in found]) if options.json else text(found))
    return 1 if any(one.problems for one in found) else 0


def _rules_helper(arguments: list[str]) -> int:
    """What `serve` starts to write rules; not for people."""
    from hostagent.drivers.network import nft_helper

    del arguments
    return nft_helper.main()


def _xts_helper(arguments: list[str]) -> int:
    """Encrypts a disk's key; see drivers/storage/luks.py."""
    del arguments
    from hostagent.drivers.storage.xts_helper import main

    return main()


def _version(arguments: list[str]) -> int:
    del arguments
    print(version.version())
    return 0
