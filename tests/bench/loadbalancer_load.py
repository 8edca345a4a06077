"""A client or a server of the load-balancer benchmark, as a process: orders on stdin, answers on stdout, one JSON line each."""

from __future__ import annotations

import json
import select
import socket
import sys
import time

REQUEST = b"GET / HTTP/1.1\r\nHost: b\r\n\r\n"
BODY = b"x" * 200
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\nConnection: close\r\n\r\n" + BODY


def main() -> None:
    if sys.argv[1] == "server":
        serve(int(sys.argv[2]))
        return
    for line in sys.stdin:
        order = json.loads(line)
        answer = ORDERS[order.pop("do")](**order)
        print(json.dumps(answer), flush=True)


def serve(port: int) -> None:
    """Answers small requests at once; a connection that begins with S sends bytes to nowhere."""
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("0.0.0.0", port))
    server.listen(4096)
    server.setblocking(False)
    poll = select.epoll()
    poll.register(server.fileno(), select.EPOLLIN)
    flows: dict[int, socket.socket] = {}
    print(json.dumps({"listening": port}), flush=True)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == server.fileno():
                try:
                    flow, _ = server.accept()
                except OSError:
                    continue
                flow.setblocking(False)
                flows[flow.fileno()] = flow
                poll.register(flow.fileno(), select.EPOLLIN)
                continue
            flow = flows[descriptor]
            try:
                data = flow.recv(1 << 18)
                if data[:1] == b"G":
                    flow.sendall(ANSWER)
                    data = b""
            except OSError:
                data = b""
            if not data:
                poll.unregister(descriptor)
                del flows[descriptor]
                flow.close()


def connections(host: str, port: int, count: int) -> dict[str, float]:
    """One after the other."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        flow = socket.create_connection((host, port), timeout=10)
        flow.sendall(REQUEST)
        while flow.recv(4096):
            pass
        times.append(time.perf_counter() - started)
        flow.close()
    return summary(times)


def paced(host: str, port: int, rate: int, seconds: float) -> dict[str, float]:
    """New connections at a fixed rate, whatever the answers do; latency counts from when each was due."""
    poll = select.epoll()
    flows: dict[int, tuple[socket.socket, float, bool]] = {}
    times: list[float] = []
    total = int(rate * seconds)
    begun, failed = 0, 0
    start = time.perf_counter()
    while len(times) + failed < total:
        now = time.perf_counter()
        while begun < total and start + begun / rate <= now:
            flow = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            flow.setblocking(False)
            flow.connect_ex((host, port))
            flows[flow.fileno()] = (flow, start + begun / rate, False)
            poll.register(flow.fileno(), select.EPOLLOUT)
            begun += 1
        due = start + begun / rate - time.perf_counter() if begun < total else 1.0
        select.select([poll.fileno()], [], [], max(0.0, due))  # epoll's own time-out is of whole milliseconds
        for descriptor, _ in poll.poll(0):
            flow, since, is_sent = flows[descriptor]
            try:
                if not is_sent:
                    flow.send(REQUEST)
                    flows[descriptor] = (flow, since, True)
                    poll.modify(descriptor, select.EPOLLIN)
                    continue
                if flow.recv(4096):
                    continue
                times.append(time.perf_counter() - since)
            except OSError:
                failed += 1
            poll.unregister(descriptor)
            del flows[descriptor]
            flow.close()
        if time.perf_counter() - start > seconds + 20:
            break
    return {**summary(times), "failed": failed + len(flows)}


def stream(host: str, port: int, size: int) -> dict[str, float]:
    block = b"S" * (1 << 17)
    started = time.perf_counter()
    flow = socket.create_connection((host, port), timeout=10)
    sent = 0
    while sent < size:
        flow.sendall(block)
        sent += len(block)
    flow.shutdown(socket.SHUT_WR)
    while flow.recv(4096):
        pass
    flow.close()
    return {"seconds": time.perf_counter() - started, "bytes": sent}


def summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    if not ordered:
        return {"count": 0, "p50_us": 0.0, "p99_us": 0.0}
    return {
        "count": len(ordered),
        "p50_us": 1e6 * ordered[len(ordered) // 2],
        "p99_us": 1e6 * ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
    }


ORDERS = {"connections": connections, "paced": paced, "stream": stream}

if __name__ == "__main__":
    main()
