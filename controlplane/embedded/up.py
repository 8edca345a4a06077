"""`bedplate up`: the whole control plane on one machine, in one command.

The one rule: a database or Redis given by URL always wins over the embedded one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path

from pydantic import ValidationError

from controlplane.embedded.postgres import PostgresFailed
from controlplane.embedded.services import Deployment
from controlplane.embedded.state import StateDirectory, StateUnusable
from controlplane.embedded.supervisor import ServiceFailed, Supervisor
from controlplane.embedded.valkey import ValkeyFailed
from controlplane.keyfile import KeyFileUnusable, load_sealer
from controlplane.listener import ListenerRefused, bind
from controlplane.settings import Settings

_COLOURS = {"ready": 32, "started": 32, "stopped": 90, "was": 31, "ended": 31, "could": 31}


def say(name: str, words: str) -> None:
    """One status line on standard error: when, which process, what."""
    line = f"{time.strftime('%H:%M:%S')} {name:<9} {words}"
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        line = f"\x1b[{_COLOURS.get(words.split(' ', 1)[0], 0)}m{line}\x1b[0m"
    print(line, file=sys.stderr, flush=True)


async def run(deployment: Deployment, *, echo: bool, announce: bool = True) -> None:
    """Run all until SIGINT or SIGTERM; a second signal does not cut the orderly stop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    began = time.monotonic()
    is_first = not deployment.state.token_file.exists()
    base = Supervisor(deployment.stores(), log_directory=deployment.state.log_directory, report=say, echo=echo)
    rest = Supervisor(deployment.programs(), log_directory=deployment.state.log_directory, report=say, echo=echo)
    try:
        if await _unless(stop, _start(deployment, base, rest)):
            if announce:
                say("bedplate", f"up in {time.monotonic() - began:.1f} s; stop it with Ctrl-C")
                _tell(deployment, is_first=is_first)
            await stop.wait()
        say("bedplate", "stopping")
    finally:
        await rest.stop()
        await base.stop()


def check_ports(settings: Settings) -> None:
    """Raises ListenerRefused where somebody listens already: another Bedplate's answer would pass for our own."""
    for face, listen in (("API", settings.api.listen), ("GATEWAY", settings.gateway.listen)):
        try:
            bind(listen).close()
        except ListenerRefused as refused:
            raise ListenerRefused(f"{refused}; BEDPLATE_{face}__LISTEN=HOST:PORT chooses another place") from refused


async def _start(deployment: Deployment, base: Supervisor, rest: Supervisor) -> None:
    await base.start()
    await deployment.make_database()
    for name, argv in deployment.preparations():
        await _once(deployment, argv, name)
    await rest.start()


async def _unless(stop: asyncio.Event, work: Coroutine[None, None, None]) -> bool:
    """Do the work unless told to stop; whether it was done. Its failure is raised."""
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        task.result()
        return True
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return False


async def _once(deployment: Deployment, argv: tuple[str, ...], name: str) -> None:
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *argv,
        env=deployment.environment(),
        cwd="/",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
    words = output.decode(errors="replace").strip()
    if process.returncode != 0:
        raise ServiceFailed(f"{name} failed: {words}")
    say(name, f"{words or 'done'} ({time.monotonic() - began:.1f} s)")


def _tell(deployment: Deployment, *, is_first: bool) -> None:
    say("bedplate", f"API      {deployment.api_url}")
    if deployment.gateway_url:
        say("bedplate", f"gateway  {deployment.gateway_url}")
    say("bedplate", f"state    {deployment.state.path} (operator token: {deployment.state.token_file})")
    if is_first and sys.stderr.isatty():  # a secret is shown to a person, never written to a log
        say("bedplate", f"operator token, shown this once: {deployment.state.token_file.read_text().strip()}")
    if deployment.state.link_file.exists():
        say("bedplate", f"nobody has signed in yet: the first operator's one-time link is in {deployment.state.link_file}")
        if sys.stderr.isatty():
            say("bedplate", f"sign in once by {deployment.api_url}/welcome#{deployment.state.link_file.read_text().strip()}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bedplate up", description="Run the whole control plane on this machine.")
    parser.add_argument("--state", type=Path, help="state directory (default: BEDPLATE_STATE_DIR, else /var/lib/bedplate)")
    parser.add_argument("--verbose", action="store_true", help="also print the log lines of all processes")
    chosen = parser.parse_args(arguments)
    if chosen.state is not None:
        os.environ["BEDPLATE_STATE_DIR"] = str(chosen.state.absolute())
    try:
        settings = Settings()
        state = StateDirectory(path=settings.state_dir.absolute())
        state.prepare()
        with state.lock():
            check_ports(settings)
            load_sealer(settings)  # makes the master key at the first start
            asyncio.run(run(Deployment(settings=settings, state=state), echo=chosen.verbose))
    except ValidationError as error:
        print(f"the configuration is not valid: {error}", file=sys.stderr)
        return 2
    except (StateUnusable, KeyFileUnusable, ListenerRefused, ServiceFailed, PostgresFailed, ValkeyFailed) as error:
        print(f"bedplate up: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
