"""What a volume's daemon costs beside plain QEMU on the same data: `python -m tests.bench.storage --json [--quick]`.

The same qcow2 file is served over NBD twice, by `qemu-storage-daemon` with the nodes that the agent gives it (throttle filter among
them) and by `qemu-nbd`; `qemu-img bench` writes and reads 64 KiB blocks, 16 at a time, in turn against both, and the best of the
rounds counts. `throughput_vs_plain_qemu` is without encryption; `encrypted_*` says what AES-XTS costs beside it, on a file of its
own. `snapshot_10gib_seconds` is a snapshot of a running, encrypted volume of 10 GiB through the agent's driver.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hostagent.drivers.storage import layers, luks, qsd_graph
from hostagent.drivers.storage.protocol import VolumePlan
from hostagent.drivers.storage.qsd import DAEMON, QsdStorage
from hostagent.drivers.supervisor.plain import PlainSupervisor
from hostagent.lib.paths import Paths
from hostagent.lib.qmp import connect
from hostagent.lib.wait import until
from hostagent.protocol.errors import AgentError
from hostagent.protocol.wanted import Generation, VolumeWanted

MIB, GIB = 1 << 20, 1 << 30
BLOCK_BYTES = 64 << 10
DEPTH = 16
READY_SECONDS = 20.0
KEY = b"k" * 32
VOLUME = "vol_bench"


def volume(size_bytes: int) -> VolumeWanted:
    return VolumeWanted(id=VOLUME, generation=Generation(epoch=1, number=1), size_bytes=size_bytes)


async def until_there(path: Path) -> None:
    async def is_there() -> bool:
        return path.exists()

    if not await until(is_there, seconds=READY_SECONDS):
        raise TimeoutError(f"{path} is not there after {READY_SECONDS} s")


@contextmanager
def process(*argv: str) -> Iterator[None]:
    started = subprocess.Popen(argv)
    try:
        yield
    finally:
        started.terminate()
        started.wait(timeout=20)


def load(socket: Path, export: str, *, count: int, is_write: bool) -> float:
    """MiB a second."""
    argv = ["qemu-img", "bench", "-f", "raw", "-c", str(count), "-d", str(DEPTH), "-s", str(BLOCK_BYTES), "-n"]
    argv += ["-w", "--pattern=7"] if is_write else []
    argv += [f"nbd+unix:///{export}?socket={socket}"]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=300)
    found = re.search(r"completed in ([\d.]+) seconds", done.stdout)
    assert found is not None, done.stdout
    return count * BLOCK_BYTES / MIB / max(float(found[1]), 0.001)


async def ours(directory: Path, key_id: str, *, count: int) -> dict[str, float]:
    """The daemon with our nodes on the file in `directory`."""
    stored = layers.Layers(layers=(layers.Layer(file=layers.FIRST, key_id=key_id),))
    monitor, socket = directory / "qmp.sock", directory / "ours.sock"
    argv = (DAEMON, "--pidfile", str(directory / "pid"), "--chardev", f"socket,path={monitor},server=on,wait=off,id=qmp")
    with process(*argv, "--monitor", "chardev=qmp"):
        await until_there(directory / "pid")
        async with connect(monitor) as qmp:
            if key_id:
                data = base64.b64encode(luks.passphrase_of(KEY)).decode()
                secret = {"qom-type": "secret", "id": qsd_graph.secret_of(key_id), "data": data, "format": "base64"}
                await qmp.execute("object-add", secret)
            for command, arguments in qsd_graph.graph(volume(GIB), directory, stored):
                await qmp.execute(command, arguments)
            await qmp.execute("nbd-server-start", {"addr": {"type": "unix", "data": {"path": str(socket)}}})
            export = {"type": "nbd", "id": "nbd", "node-name": qsd_graph.ROOT, "name": "d", "writable": True}
            await qmp.execute("block-export-add", export)
        return _both(socket, "d", count)


async def plain(directory: Path, *, count: int) -> dict[str, float]:
    socket = directory / "plain.sock"
    (directory / "plain.pid").unlink(missing_ok=True)
    argv = ("qemu-nbd", "-t", "-f", "qcow2", "--discard=unmap", "--cache=writeback", "-k", str(socket))
    with process(*argv, f"--pid-file={directory / 'plain.pid'}", str(directory / layers.FIRST)):
        await until_there(directory / "plain.pid")
        return _both(socket, "", count)


def _both(socket: Path, export: str, count: int) -> dict[str, float]:
    return {word: load(socket, export, count=count, is_write=word == "write") for word in ("write", "read")}


async def snapshot_seconds(root: Path, rounds: int) -> float:
    """The best of some snapshots, through the driver and a supervisor of its own."""
    paths = Paths.under(root)
    supervisor = PlainSupervisor(paths.run)
    with process(sys.executable, "-m", "hostagent.drivers.supervisor.init", "--run", str(paths.run)):

        async def answers() -> bool:
            try:
                await supervisor.names()
            except AgentError:
                return False
            return True

        assert await until(answers, seconds=READY_SECONDS)
        driver = QsdStorage(supervisor, paths)
        plan = VolumePlan(
            volume=volume(10 * GIB),
            directory=paths.volume_directory(VOLUME),
            run_directory=paths.volume_run_directory(VOLUME),
            log_path=paths.log / "volume.log",
            uid=os.geteuid(),
            gid=os.getegid(),
            keys={VOLUME: KEY},
        )
        await driver.apply(plan)
        taken = []
        for number in range(rounds):
            began = time.monotonic()
            await driver.snapshot(plan, f"snap_{number}", paths.snapshot_directory(f"snap_{number}"))
            taken.append(time.monotonic() - began)
        await driver.remove(VOLUME)
    return min(taken)


def _best(figures: list[dict[str, float]], word: str) -> float:
    return max(figure[word] for figure in figures)


async def measure(*, is_quick: bool) -> list[dict[str, Any]]:
    rounds, count = (1, 512) if is_quick else (5, 8192)
    root = Path(tempfile.mkdtemp(prefix="bp-storage-"))
    try:
        directories = {"plain": root / "plain", "encrypted": root / "encrypted"}
        for name, directory in directories.items():
            directory.mkdir()
            passphrase = luks.passphrase_of(KEY) if name == "encrypted" else None
            (directory / layers.FIRST).write_bytes(await luks.empty_disk(GIB, passphrase))
        figures: dict[str, list[dict[str, float]]] = {"ours": [], "plain": [], "encrypted": []}
        for _ in range(rounds + 1):  # the first one allocates every cluster and does not count
            figures["plain"].append(await plain(directories["plain"], count=count))
            figures["ours"].append(await ours(directories["plain"], "", count=count))
            figures["encrypted"].append(await ours(directories["encrypted"], VOLUME, count=count))
        counted = {name: found[1:] for name, found in figures.items()}
        snapshot = await snapshot_seconds(root / "host", rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    rows: list[dict[str, Any]] = []
    for name, mine, peer in (
        ("throughput_vs_plain_qemu", "ours", "plain"),
        ("encrypted_vs_unencrypted", "encrypted", "ours"),
    ):
        for word in ("write", "read"):
            value, other = _best(counted[mine], word), _best(counted[peer], word)
            row = {"metric": f"{name}_{word}", "ours": round(value, 1), "unit": "MiB/s", "peer": f"{peer} {word}"}
            rows.append(row | {"peer_value": round(other, 1), "ratio": round(value / other, 3)})
    both = [sum(_best(counted[name], word) for word in ("write", "read")) for name in ("ours", "plain")]
    total = {"metric": "throughput_vs_plain_qemu", "ours": round(both[0], 1), "unit": "MiB/s", "peer": "qemu-nbd"}
    rows.append(total | {"peer_value": round(both[1], 1), "ratio": round(both[0] / both[1], 3)})
    rows.append({"metric": "snapshot_10gib_seconds", "ours": round(snapshot, 3), "unit": "s"})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a smoke run: the figures mean little")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    rows = asyncio.run(measure(is_quick=options.quick))
    machine = f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, load {load_before:.2f}"
    report = {
        "name": "storage",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine,
        "command": "python -m tests.bench.storage" + (" --quick" if options.quick else ""),
        "rows": rows,
    }
    if options.json:
        print(json.dumps(report, ensure_ascii=False))
        return
    print(f"{report['date']}, {report['machine']}, `{report['command']}`:\n")
    print("| metric | ours | unit | peer | peer's | ratio |\n|---|---:|---|---|---:|---:|")
    for row in rows:
        print(f"| {' | '.join(str(row.get(name, '')) for name in ('metric', 'ours', 'unit', 'peer', 'peer_value', 'ratio'))} |")


if __name__ == "__main__":
    main()
