"""Every face but `dispatch`: arguments in, an exit code out."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from pathlib import Path

from hostagent import version
from hostagent.lib import hostconfig
from hostagent.lib.lock import AlreadyLocked
from hostagent.lib.paths import Paths
from hostagent.protocol import codec


def run(face: str, arguments: list[str]) -> int:
    table = {
        "serve": _serve,
        "facts": _facts,
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


def _version(arguments: list[str]) -> int:
    del arguments
    print(version.version())
    return 0
