"""The first of the four steps of fail-over: a replica dies, and the gateway sends its requests elsewhere before their first byte.

The one rule: a client that sees anything but 200 ends the benchmark; what is measured is how much later the slowest are.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import asyncpg

from controlplane.core.ids import Kind, new_id
from controlplane.embedded.postgres import Postgres
from tests.bench.gateway import KEY, ROOT, lay_rows, make_database, process
from tests.bench.gateway_ports import free_port, until_listening

RATE = 200


def request_failover(*, seconds: float, rounds: int) -> list[float]:
    """Milliseconds that the 99th percentile of a run in which one of two replicas is killed is above that of a quiet run."""
    directory = Path(tempfile.mkdtemp(prefix="bedplate-bench-"))
    directory.chmod(0o755)
    postgres = Postgres(directory=directory / "pg")
    postgres.prepare()
    server = postgres.start()
    ports, gateway = [free_port(), free_port()], free_port()
    environment = {
        "BEDPLATE_DATABASE__URL": postgres.url("bedplate"),
        "BEDPLATE_STATE_DIR": str(directory / "state"),
        "BEDPLATE_CONFIG": str(directory / "none.toml"),
        "BEDPLATE_GATEWAY__LISTEN": f"127.0.0.1:{gateway}",
    }
    try:
        asyncio.run(make_database(postgres.url("postgres")))
        asyncio.run(lay_rows(postgres.url("bedplate"), f"http://127.0.0.1:{ports[0]}"))
        asyncio.run(second_replica(postgres.url("bedplate"), f"http://127.0.0.1:{ports[1]}"))
        with (
            process([sys.executable, "-m", "tests.bench.gateway_upstream", str(ports[0])], ports[0]),
            process([sys.executable, "-m", "controlplane.gateway"], gateway, **environment),
        ):
            return [added(f"http://127.0.0.1:{gateway}", ports[1], seconds) for _ in range(rounds)]
    finally:
        postgres.stop()
        if server is not None:
            server.wait()
        shutil.rmtree(directory, ignore_errors=True)


async def second_replica(url: str, upstream: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(
        "INSERT INTO replica (id, project_id, endpoint_id, state, base_url, ready_at)"
        " SELECT $1, project_id, endpoint_id, 'ready', $2, now() FROM replica LIMIT 1",
        new_id(Kind.REPLICA),
        upstream,
    )
    await connection.close()


def added(gateway: str, port: int, seconds: float) -> float:
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.gateway_upstream", str(port)], cwd=ROOT, env=os.environ, stderr=subprocess.DEVNULL
    )
    try:
        until_listening(port)
        quiet = paced(gateway, seconds)
        threading.Timer(seconds / 2, child.kill).start()
        return paced(gateway, seconds) - quiet
    finally:
        child.kill()
        child.wait()


def paced(gateway: str, seconds: float) -> float:
    """The 99th percentile in milliseconds."""
    argv = [sys.executable, "-m", "tests.bench.gateway_load", gateway, KEY, "open", "32", str(seconds), str(RATE)]
    done = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120)
    return json.loads(done.stdout)["p99_ms"]


if __name__ == "__main__":
    print(request_failover(seconds=3, rounds=3))
