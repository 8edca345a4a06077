"""`python -m provisioning.images build [--cache DIR] [--mirror URL]`: builds the guest image and prints its directory."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from provisioning.images.build import build, summary
from provisioning.images.debian import BuildError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m provisioning.images")
    verbs = parser.add_subparsers(dest="verb", required=True)
    command = verbs.add_parser("build", help="build the Debian guest image, or find it in the cache")
    command.add_argument("--cache", type=Path, help="default: BEDPLATE_CACHE_DIR, or ~/.cache/bedplate")
    command.add_argument("--mirror", default="", help="Debian mirror; default: BEDPLATE_APT_MIRROR, or the machine's own")
    arguments = parser.parse_args()
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

    try:
        directory = build(cache=arguments.cache, mirror=arguments.mirror, say=say)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    say(summary(directory))
    print(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
