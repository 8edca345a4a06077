"""`python -m provisioning.lab --directory DIR up|list|exec|ssh|reboot|stop|clean`: a lab by hand."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from provisioning.lab.lab import Lab
from provisioning.lab.model import HostSpec, LabError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m provisioning.lab", description="Hosts on one machine (needs root).")
    parser.add_argument("--directory", type=Path, default=Path("/var/lib/bedplate/lab"), help="where the lab lives")
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="make the lab, or start what is not running")
    up.add_argument("--name", default="lab")
    up.add_argument("--hosts", type=int, default=2, help="hosts with a network of their own (default 2)")
    up.add_argument("--gateway", action="store_true", help="also a host in the machine's own network namespace")
    up.add_argument("--cores", type=int, default=1, help="declared share of each host")
    up.add_argument("--memory-mib", type=int, default=2048, help="declared share of each host")
    verbs.add_parser("list", help="hosts, addresses, how to log in")
    verbs.add_parser("clean", help="remove everything")
    for verb in ("exec", "ssh"):
        command = verbs.add_parser(verb, help=f"run a command on a host by {'namespaces' if verb == 'exec' else 'SSH'}")
        command.add_argument("host")
        command.add_argument("argv", nargs=argparse.REMAINDER)
    for verb in ("reboot", "stop"):
        verbs.add_parser(verb).add_argument("host")
    return parser


def _up(arguments: argparse.Namespace) -> None:
    share = {"cores": arguments.cores, "memory_bytes": arguments.memory_mib << 20}
    specs = [HostSpec(name=f"{arguments.name}{index}", **share) for index in range(1, arguments.hosts + 1)]
    if arguments.gateway:
        specs.append(HostSpec(name=f"{arguments.name}-gateway", kind="gateway", **share))
    lab = Lab(arguments.name, arguments.directory, tuple(specs))
    lab.up()
    _list(lab)


def _list(lab: Lab) -> None:
    for host in lab.hosts:
        state = "running" if host.is_running else "stopped"
        print(f"{host.name}\t{state}\troot@{host.address}:{host.port}\t{host.data_address}")
    print(f"identity\t{lab.identity}", file=sys.stderr)


def main() -> int:
    arguments = _parser().parse_args()
    try:
        if arguments.verb == "up":
            _up(arguments)
            return 0
        lab = Lab.found(arguments.directory)
        match arguments.verb:
            case "list":
                _list(lab)
            case "clean":
                lab.clean()
            case "reboot":
                lab.host(arguments.host).reboot()
            case "stop":
                lab.host(arguments.host).stop()
            case "exec":
                return subprocess.call(lab.host(arguments.host).exec_argv(arguments.argv or ["/bin/bash", "-l"]))
            case _:
                argv = lab.host(arguments.host).ssh_argv(arguments.argv)
                os.execvp(argv[0], argv if arguments.argv else argv[:-1])  # noqa: S606 - becomes ssh, with the terminal
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
