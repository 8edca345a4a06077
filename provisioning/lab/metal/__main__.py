"""`python -m provisioning.lab.metal --directory DIR build|up|show|ssh|stop|clean`: an emulated server by hand."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from provisioning.images.debian import BuildError
from provisioning.lab.metal.host import MetalHost
from provisioning.lab.metal.image import build
from provisioning.lab.metal.machine import MetalSpec
from provisioning.lab.model import LabError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m provisioning.lab.metal", description="An emulated server (needs root).")
    parser.add_argument("--directory", type=Path, default=Path("/var/lib/bedplate/metal"), help="where the server lives")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("build", help="build the disk of a fresh server, or find it in the cache")
    up = verbs.add_parser("up", help="make the server, or start it when it does not run")
    up.add_argument("--name", default="metal1")
    up.add_argument("--cores", type=int, default=2)
    up.add_argument("--memory-mib", type=int, default=3072)
    verbs.add_parser("show", help="address and key")
    verbs.add_parser("ssh", help="log in as root, or run a command").add_argument("argv", nargs=argparse.REMAINDER)
    verbs.add_parser("stop", help="cut the power")
    verbs.add_parser("clean", help="remove everything")
    return parser


def _show(host: MetalHost) -> None:
    print(f"{host.name}\t{'running' if host.is_running else 'stopped'}\troot@{host.address}")
    print(f"identity\t{host.identity}", file=sys.stderr)


def main() -> int:
    arguments = _parser().parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    try:
        match arguments.verb:
            case "build":
                print(build(say=say))
            case "up":
                spec = MetalSpec(name=arguments.name, cores=arguments.cores, memory_bytes=arguments.memory_mib << 20)
                host = MetalHost(arguments.directory, spec, image=build(say=say))
                host.up()
                _show(host)
            case "show":
                _show(MetalHost(arguments.directory))
            case "stop":
                MetalHost(arguments.directory).stop()
            case "clean":
                MetalHost(arguments.directory).clean()
            case _:
                argv = MetalHost(arguments.directory).ssh_argv(arguments.argv)
                os.execvp(argv[0], argv if arguments.argv else argv[:-2])  # noqa: S606 - becomes ssh, with the terminal
    except (LabError, BuildError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
