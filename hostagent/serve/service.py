"""The service's process. The one rule: it may be killed at any moment; everything it must know again is on disk."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import json
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from hostagent.drivers.registry import Drivers, host_drivers
from hostagent.lib import hostconfig, lock
from hostagent.lib.paths import Paths
from hostagent.protocol.frames import MAX_LINE_BYTES
from hostagent.serve import streams
from hostagent.serve.keeper import INTERVAL_SECONDS, Keeper
from hostagent.serve.metrics import Metrics
from hostagent.serve.session import Session
from hostagent.verbs import rules, standby
from hostagent.verbs.context import Agent, open_agent

logger = logging.getLogger(__name__)
HELLO_SECONDS = 10.0
GROUP = "bedplate"


async def run(paths: Paths, *, version: str, interval_seconds: float = INTERVAL_SECONDS) -> None:
    """Serve until SIGTERM or SIGINT. Raises AlreadyLocked when another agent serves the same state."""
    os.umask(0o022)
    paths.state.mkdir(parents=True, exist_ok=True, mode=0o755)
    descriptor = lock.hold(paths.state / "serve.lock")
    config = hostconfig.load(paths.host_config)
    agent = await open_agent(paths, config, await host_drivers(paths, config), version=version)
    metrics = Metrics()
    keeper = Keeper(agent, metrics, interval_seconds=interval_seconds)
    _learn(agent)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(os.close, descriptor)
        stack.push_async_callback(agent.rules.close)
        stack.push_async_callback(agent.balancers.close)
        stack.push_async_callback(agent.balancer_counts.close)
        stack.callback(agent.notices.close)
        stack.callback(agent.drivers.addresses.rivals.close)
        await standby.adopt(agent)
        await rules.start(agent)
        agent.balancers.start()
        if agent.drivers.rules.traits.name != "fake":
            agent.balancer_counts.start()
        await _listen(stack, paths.socket, lambda r, w: _accept(agent, metrics, r, w), mode=0o660)
        await _listen(stack, paths.metrics_socket, lambda r, w: metrics.answer(agent, r, w), mode=0o660)
        tell_systemd("READY=1")
        tasks = await _first_of(stop.wait(), keeper.run(), rules.guard(agent), standby.stand_by(agent))
        await agent.jobs.close()
        keeper.close()
    if not stop.is_set():
        for task in tasks:
            if not task.cancelled():
                task.result()


async def _first_of(*work: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """Do all until one ends; the others are cancelled."""
    tasks = [asyncio.create_task(one, name=one.__qualname__) for one in work]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return tasks


def tell_systemd(state: str) -> None:
    """To whoever started us and waits until we serve; nobody is fine too. Source: sd_notify(3)."""
    path = os.environ.pop("NOTIFY_SOCKET", "")
    if path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify, contextlib.suppress(OSError):
            notify.sendto(state.encode(), f"\0{path[1:]}" if path.startswith("@") else path)


def _learn(agent: Agent) -> None:
    from hostagent.facts.host import Learner

    learner = Learner(agent.paths, agent.config, agent.drivers, agent.version, agent.keyring)
    agent.learn_facts = learner.learn
    agent.probe_kvm = learner.probe_kvm


async def _accept(agent: Agent, metrics: Metrics, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The first line says which face is wanted: `{"face":"rpc"}`, or `{"face":"stream","ticket":…}`."""
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            hello = json.loads(await reader.readline())
        if hello.get("face") == "rpc":
            await Session(agent, metrics, reader, writer).run()
        elif hello.get("face") == "stream":
            request = agent.tickets.redeem(str(hello.get("ticket")))
            if request is not None:
                await streams.serve(agent, request, reader, writer)
    except (ConnectionError, TimeoutError, ValueError, AttributeError) as error:
        logger.info("a connection ended: %r", error)
    except Exception:
        logger.exception("a connection failed")
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def _listen(stack: contextlib.AsyncExitStack, path: Path, accept: Accept, *, mode: int) -> None:
    """A UNIX socket that replaces a dead agent's, open to root and the agent's group."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    path.parent.chmod(0o755)  # whoever made it may have had a stricter umask; the login user passes through
    path.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(accept, path, limit=MAX_LINE_BYTES)
    path.chmod(mode)
    with contextlib.suppress(KeyError, PermissionError):
        os.chown(path, -1, grp.getgrnam(GROUP).gr_gid)

    async def close() -> None:
        server.close()
        path.unlink(missing_ok=True)

    stack.push_async_callback(close)


__all__ = ["Drivers", "run"]
