"""The stage of the load-balancer benchmark: a client, three balancers side by side, four backends, each in network namespaces.

`ours` is this thread's namespace with the agent's own table; `bare` has nothing but one rule; `plain` routes, and HAProxy and nginx
listen there. Every path has as many hops. Conntrack is each namespace's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests import namespaces
from tests.agent.balancing import Place, ip, sysctl

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = 4
PORT = 8080
OURS, BARE = "203.0.113.10", "203.0.113.11"
HAPROXY_PORT, NGINX_PORT = 81, 82


class Child:
    """A process of the benchmark in a namespace; `cpu` is what all its threads and children used, in nanoseconds."""

    def __init__(self, place: Place, *argv: str, is_asked: bool = False) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{place.name}", *argv],
            cwd=ROOT,
            stdin=pipe if is_asked else subprocess.DEVNULL,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        if self.process.returncode is None:
            self.process.kill()
            self.process.wait()
        for channel in (self.process.stdin, self.process.stdout):
            if channel:
                channel.close()


def family(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += family(int(child))
    return found


def cpu_ns(pid: int) -> int:
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


def kernel_threads() -> list[int]:
    """ksoftirqd takes over packets when there are many."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if path.read_text().startswith("ksoftirqd"):
                found.append(int(path.parent.name))
    return found


class Stage:
    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="bedplate-bench-"))
        self.directory.chmod(0o755)
        self.client, self.servers, self.plain, self.bare = (Place() for _ in range(4))
        self.children: list[Child] = []

    def build(self) -> None:
        for number, place in enumerate((self.plain, self.bare, None)):
            self._wire(number, place)
        for address in (OURS, f"{BARE}"):
            number = 2 if address == OURS else 1
            ip("route", "add", f"{address}/32", "via", f"198.51.{number}.1", netns=self.client.name)
        self._bare_rules()
        (self.directory / "haproxy.cfg").write_text(self._haproxy())
        (self.directory / "nginx.conf").write_text(self._nginx())
        self.server = self._start(self.servers, sys.executable, "-m", "tests.bench.loadbalancer_load", "server", str(PORT))
        self.server.process.stdout.readline()
        self.load = self._start(self.client, sys.executable, "-m", "tests.bench.loadbalancer_load", "client", is_asked=True)
        self.haproxy = self._start(self.plain, "/usr/sbin/haproxy", "-db", "-f", str(self.directory / "haproxy.cfg"))
        self.nginx = self._start(self.plain, "/usr/sbin/nginx", "-p", str(self.directory), "-c", "nginx.conf")
        for port in (HAPROXY_PORT, NGINX_PORT):
            self._until_served("198.51.0.1", port)
        self.ksoftirqd = kernel_threads()

    def _start(self, place: Place, *argv: str, is_asked: bool = False) -> Child:
        self.children.append(Child(place, *argv, is_asked=is_asked))
        return self.children[-1]

    def _until_served(self, host: str, port: int) -> None:
        for _ in range(100):
            try:
                if self.load.ask("paced", host=host, port=port, rate=10, seconds=0.2)["failed"] == 0:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise RuntimeError(f"nobody serves port {port}")

    def _wire(self, number: int, place: Place | None) -> None:
        netns = place.name if place else ""
        with place.inside() if place else contextlib.nullcontext():
            sysctl("net/ipv4/ip_forward", "1")
        ip("link", "add", "c0", "type", "veth", "peer", "name", f"b{number}", "netns", self.client.name, netns=netns)
        ip("address", "add", f"198.51.{number}.1/24", "dev", "c0", netns=netns)
        ip("address", "add", f"198.51.{number}.2/24", "dev", f"b{number}", netns=self.client.name)
        ip("link", "set", "c0", "up", netns=netns)
        ip("link", "set", f"b{number}", "up", netns=self.client.name)
        for index in range(1, BACKENDS + 1):
            link, peer, address = nic(index), f"p{number}x{index}", f"10.9.{number}.{index * 4 + 2}"
            ip("link", "add", link, "type", "veth", "peer", "name", peer, "netns", self.servers.name, netns=netns)
            ip("link", "set", peer, "address", mac(index), netns=self.servers.name)
            ip("address", "add", f"10.9.{number}.{index * 4 + 1}/30", "dev", link, netns=netns)
            ip("address", "add", f"{address}/30", "dev", peer, netns=self.servers.name)
            ip("link", "set", link, "up", netns=netns)
            ip("link", "set", peer, "up", netns=self.servers.name)
            table = str(100 + 10 * number + index)
            ip("rule", "add", "from", address, "lookup", table, netns=self.servers.name)
            ip("route", "add", "default", "via", f"10.9.{number}.{index * 4 + 1}", "table", table, netns=self.servers.name)
        ip("route", "add", f"10.9.{number}.0/24", "via", f"198.51.{number}.1", netns=self.client.name)

    def _bare_rules(self) -> None:
        elements = ", ".join(f"{n} : {backend(1, n % BACKENDS + 1)} . {PORT}" for n in range(251))
        text = f"""
        table ip bare {{
          map buckets {{ typeof numgen inc mod 65536 : ip daddr . tcp dport; elements = {{ {elements} }}; }}
          chain pre {{
            type nat hook prerouting priority dstnat; policy accept;
            ip daddr {BARE} tcp dport 443 dnat ip to jhash ip saddr . tcp sport mod 251 seed 0x5eed map @buckets
          }}
        }}"""
        subprocess.run(
            ["nsenter", f"--net=/run/netns/{self.bare.name}", "nft", "-f", "-"], input=text, text=True, check=True, timeout=30
        )

    def _haproxy(self) -> str:
        servers = "".join(f"  server s{n} {backend(0, n)}:{PORT}\n" for n in range(1, BACKENDS + 1))
        return (
            "global\n  maxconn 2000\ndefaults\n  mode tcp\n  timeout connect 5s\n  timeout client 60s\n  timeout server 60s\n"
            f"frontend f\n  bind 198.51.0.1:{HAPROXY_PORT}\n  default_backend b\nbackend b\n  balance roundrobin\n{servers}"
        )

    def _nginx(self) -> str:
        servers = "".join(f"server {backend(0, n)}:{PORT}; " for n in range(1, BACKENDS + 1))
        return (
            "load_module /usr/lib/nginx/modules/ngx_stream_module.so;\n"
            f"daemon off; worker_processes auto; pid {self.directory}/nginx.pid; error_log /dev/null;\n"
            "events { worker_connections 8192; }\n"
            f"stream {{ upstream b {{ {servers} }} server {{ listen 198.51.0.1:{NGINX_PORT} backlog=4096; proxy_pass b; }} }}\n"
        )

    def paths(self) -> dict[str, tuple[str, int]]:
        return {
            "direct": (backend(0, 1), PORT),
            "bare": (BARE, 443),
            "ours": (OURS, 443),
            "haproxy": ("198.51.0.1", HAPROXY_PORT),
            "nginx": ("198.51.0.1", NGINX_PORT),
        }

    def cpu(self) -> int:
        """Of everything that takes part, kernel included: packets are handled in the time of whoever sends them."""
        pids = [pid for child in self.children for pid in family(child.process.pid)]
        return sum(cpu_ns(pid) for pid in (*pids, *self.ksoftirqd))

    def forget_flows(self) -> None:
        for place in (self.plain, self.bare, None):
            argv = ["nsenter", f"--net=/run/netns/{place.name}"] if place else []
            subprocess.run([*argv, "conntrack", "-F"], check=False, capture_output=True, timeout=30)

    def close(self) -> None:
        for child in reversed(self.children):
            child.close()
        for place in (self.client, self.servers, self.plain, self.bare):
            place.remove()
        shutil.rmtree(self.directory, ignore_errors=True)


def in_turns(stage: Stage, modes: Sequence[str], rounds: int, order: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    """What is ordered, over each path in turns, short ones: what else the machine does meanwhile is then in all of them alike.

    Answers what the client found, with the CPU that everybody used in nanoseconds as `cpu`.
    """
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    for number in range(rounds + 1):
        for mode in modes if number % 2 else tuple(reversed(modes)):
            host, port = stage.paths()[mode]
            stage.forget_flows()
            before = stage.cpu()
            answer = stage.load.ask(host=host, port=port, **order)
            if number:  # the first round warms
                found[mode].append({**answer, "cpu": stage.cpu() - before})
    return found


def added(found: dict[str, list[dict[str, float]]], mode: str, key: str) -> float:
    """Median of what a path has more than the direct one in the same round."""
    return statistics.median(one[key] - direct[key] for one, direct in zip(found[mode], found["direct"], strict=True))


def median(found: dict[str, list[dict[str, float]]], mode: str, key: str) -> float:
    return statistics.median(one[key] for one in found[mode])


def nic(index: int) -> str:
    return f"bp00000000000{index}"


def mac(index: int) -> str:
    return f"06:00:00:00:00:0{index}"


def backend(number: int, index: int) -> str:
    return f"10.9.{number}.{index * 4 + 2}"


def row(metric: str, ours: float, unit: str, peer: str | None = None, peer_value: float | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"metric": metric, "ours": round(ours, 4), "unit": unit}
    if peer is not None and peer_value:
        found |= {"peer": peer, "peer_value": round(peer_value, 4), "ratio": round(ours / peer_value, 3)}
    return found


@contextlib.contextmanager
def staged() -> Iterator[Stage]:
    """In a namespace of its own."""
    with namespaces.own():
        stage = Stage()
        try:
            stage.build()
            yield stage
        finally:
            stage.close()
