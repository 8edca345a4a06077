"""Programs that change the host, run one after the other. The one rule: what fails says its own words."""

from __future__ import annotations

import subprocess

from hostagent.lib.program import minimal_environment

SECONDS = 120.0
APT_SECONDS = 1800.0


class CommandFailed(Exception):
    """The message is what the program said."""


def command(*argv: str, seconds: float = SECONDS, check: bool = True) -> str:
    """Its standard output. Raises CommandFailed, also when the program is missing or too slow."""
    try:
        finished = subprocess.run(
            argv,
            check=False,
            capture_output=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            env={**minimal_environment(), "DEBIAN_FRONTEND": "noninteractive"},
        )
    except FileNotFoundError:
        raise CommandFailed(f"{argv[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise CommandFailed(f"{' '.join(argv[:3])} took over {seconds:g} s") from None
    output = finished.stdout.decode(errors="replace")
    if check and finished.returncode != 0:
        words = finished.stderr.decode(errors="replace").strip() or output.strip()
        raise CommandFailed(f"{' '.join(argv[:3])}: {words[-1000:] or f'exit code {finished.returncode}'}")
    return output


def succeeds(*argv: str) -> bool:
    try:
        command(*argv)
    except CommandFailed:
        return False
    return True
