"""`bedplate demo`: the main job of Bedplate on one machine, with lab hosts made of namespaces.

The one rule: whatever a tenant or an operator would do is done here through the REST API and the gateway, nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pydantic import ValidationError

from controlplane.embedded import showcase
from controlplane.embedded.cleaning import clean
from controlplane.embedded.client import ApiFailed
from controlplane.embedded.stage import Stage, StageFailed
from controlplane.embedded.timeline import Timeline
from provisioning.lab.model import LabError
from provisioning.lab.network import check_no_gateway

_DEFAULT = Path("/var/lib/bedplate-demo")
_LOCK_NAME = "\0bedplate-demo"


class DemoRuns(RuntimeError):
    """Another demo uses the directory; the message names its pid."""


async def run(directory: Path, *, once: bool, as_json: bool) -> int:
    """Run all steps; with `once` end after the answer, else stay up until SIGINT or SIGTERM."""
    timeline = Timeline()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    stage = Stage(directory=directory, timeline=timeline)
    result: dict[str, object] = {"ok": False, "answer": None}
    code = 1
    try:
        with timeline.shown():
            show = asyncio.create_task(showcase.run(stage))
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({show, stopped}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if not show.done():
                show.cancel()
                await asyncio.gather(show, return_exceptions=True)
                code = 130
            else:
                result |= {"ok": True, **show.result()}
                code = 0
        _tell(stage, result, once=once, as_json=as_json)
        if code == 0 and not once:
            timeline.say("Everything stays up until Ctrl-C.")
            await stop.wait()
    except (StageFailed, ApiFailed, LabError, OSError) as error:
        result["error"] = str(error)
        _tell(stage, result, once=once, as_json=as_json)
        print(f"bedplate demo: {error}\nThe logs are in {stage.log_directory}.", file=sys.stderr)
    finally:
        await stage.close()
    return code


def _tell(stage: Stage, result: dict[str, object], *, once: bool, as_json: bool) -> None:
    timeline = stage.timeline
    print("\nTimeline", file=sys.stderr)
    timeline.print_table()
    if as_json:
        print(json.dumps({**result, "steps": timeline.summary(), "seconds": round(timeline.seconds, 3)}, indent=2), flush=True)
    elif result["answer"]:
        print(f"\nQuestion: {result['question']}\nAnswer:   {result['answer']}\n", flush=True)
    if result["ok"]:
        print(f"API and console: {stage.api_url}   gateway: {stage.gateway_url}", file=sys.stderr)
        where = "" if stage.directory == _DEFAULT else f" --state {stage.directory}"
        print(
            f"Command line:    ./bedplate login {stage.api_url} --project {showcase.PROJECT} < {stage.token_file}",
            file=sys.stderr,
        )
        print(f"Operator token:  {stage.token_file}   remove everything: ./bedplate demo --clean{where}", file=sys.stderr)
        if not once:
            _tell_what_to_try(stage)


def _tell_what_to_try(stage: Stage) -> None:
    """Lines to copy, for whoever has logged in."""
    key = f'KEY=$(./bedplate key create mine); curl {stage.gateway_url}/v1/chat/completions -H "authorization: Bearer $KEY"'
    body = f"""{{"model": "{showcase.MODEL}", "messages": [{{"role": "user", "content": "Who are you?"}}]}}"""
    print("Then try:", file=sys.stderr)
    print(f"  ./bedplate vm ssh first -i {stage.directory}/ssh/id_ed25519", file=sys.stderr)
    print("  ./bedplate vm create second --image debian-12 --network default", file=sys.stderr)
    print(f"  {key} -H 'content-type: application/json' -d '{body}'", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bedplate demo", description="Show everything on this machine, with two lab hosts.")
    parser.add_argument("--once", action="store_true", help="end after the answer")
    parser.add_argument("--json", action="store_true", help="print the timeline as JSON")
    parser.add_argument("--clean", action="store_true", help="remove everything that a demo made, and end")
    parser.add_argument("--state", type=Path, default=_DEFAULT, help=f"directory of the demo (default {_DEFAULT})")
    chosen = parser.parse_args(arguments)
    if os.geteuid() != 0:
        print("bedplate demo: lab hosts are made of namespaces and need root: run it with sudo", file=sys.stderr)
        return 2
    directory = chosen.state.absolute()
    if chosen.clean:
        return clean(directory)
    try:
        return _in_directory(directory, once=chosen.once, as_json=chosen.json)
    except (DemoRuns, LabError) as error:
        print(f"bedplate demo: {error}", file=sys.stderr)
        return 1
    except ValidationError as error:
        print(f"bedplate demo: the configuration is not valid: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _in_directory(directory: Path, *, once: bool, as_json: bool) -> int:
    """Remove what an ended demo left there, then run; raises DemoRuns rather than ending one that is at work.

    Raises LabError when another's gateway is in this network namespace: a lab's, which is no demo.
    """
    if directory.exists():
        hold(directory).close()  # of two demos in one directory this says more
    with hold_network():
        if directory.exists() and clean(directory, before_a_new_run=True):
            return 1
        check_no_gateway()
        directory.mkdir(parents=True, exist_ok=True, mode=0o711)
        with hold(directory):
            return asyncio.run(run(directory, once=once, as_json=as_json))


@contextlib.contextmanager
def hold_network() -> Iterator[None]:
    """The only demo in this network namespace from its first moment on; raises DemoRuns. An abstract socket leaves no file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        try:
            lock.bind(_LOCK_NAME)
        except OSError:
            raise DemoRuns(
                "another demo runs in this network namespace, and two would write the same rules and routes: end that one first"
                " (Ctrl-C), or start this one in a network namespace of its own"
            ) from None
        yield


def hold(directory: Path) -> IO[str]:
    """The lock of a demo's directory, as long as the file is open; raises DemoRuns when another has it."""
    file = (directory / "demo.lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise DemoRuns(
            f"a demo runs in {directory} already (pid {holder}): stop it with Ctrl-C, remove it with --clean, or give --state"
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


if __name__ == "__main__":
    sys.exit(main())
