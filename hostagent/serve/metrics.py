"""Prometheus text over HTTP on a UNIX socket. The one rule: counting never waits and never fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from pathlib import Path

from hostagent.facts.flows import flow_table
from hostagent.serve import storage_metrics
from hostagent.verbs.context import Agent

_ANSWER_SECONDS = 5.0


class Metrics:
    def __init__(self) -> None:
        self.verbs: Counter[tuple[str, str]] = Counter()
        self.verb_seconds: Counter[tuple[str, str]] = Counter()
        self.restarts = 0
        self.states: dict[tuple[str, str], str] = {}
        self.drifted: dict[tuple[str, str], str] = {}

    def verb_done(self, verb: str, result: str, seconds: float) -> None:
        known = verb if len(verb) <= 40 and verb.replace(".", "").isalnum() else "unknown"
        self.verbs[known, result] += 1
        self.verb_seconds[known, result] += seconds  # pyright: ignore[reportArgumentType] - Counter adds floats too

    def text(self, agent: Agent) -> str:
        lines = ["# TYPE bedplate_agent_verbs_total counter"]
        lines += [f'bedplate_agent_verbs_total{{verb="{v}",result="{r}"}} {n}' for (v, r), n in sorted(self.verbs.items())]
        lines.append("# TYPE bedplate_agent_verb_seconds_total counter")
        lines += [
            f'bedplate_agent_verb_seconds_total{{verb="{v}",result="{r}"}} {n:.6f}'
            for (v, r), n in sorted(self.verb_seconds.items())
        ]
        lines.append("# TYPE bedplate_agent_objects gauge")
        objects = Counter((kind, state) for (kind, _), state in self.states.items())
        lines += [f'bedplate_agent_objects{{kind="{k}",state="{s}"}} {n}' for (k, s), n in sorted(objects.items())]
        lines.append("# TYPE bedplate_agent_drifted_objects gauge")
        lines.append(f"bedplate_agent_drifted_objects {len(self.drifted)}")
        lines.append("# TYPE bedplate_agent_restarts_total counter")
        lines.append(f"bedplate_agent_restarts_total {self.restarts}")
        lines.append("# TYPE bedplate_agent_events_total counter")
        lines.append(f"bedplate_agent_events_total {agent.events.seq}")
        lines.append("# TYPE bedplate_agent_resident_memory_bytes gauge")
        lines.append(f"bedplate_agent_resident_memory_bytes {resident_bytes()}")
        lines.append("# TYPE bedplate_agent_rules_intact gauge")
        lines.append(f"bedplate_agent_rules_intact {int(agent.rules.is_intact)}")
        lines.append("# TYPE bedplate_agent_rules_disturbed_total counter")
        lines.append(f"bedplate_agent_rules_disturbed_total {agent.rules.disturbances}")
        lines.append("# TYPE bedplate_agent_dropped_packets_total counter")
        dropped = sorted(agent.rules.driver.counters().items())
        lines += [f'bedplate_agent_dropped_packets_total{{reason="{n.removeprefix("a_")}"}} {p}' for n, p in dropped]
        lines += _flow_lines()
        lines.append(f'bedplate_agent_info{{version="{agent.version}"}} 1')
        return "\n".join(lines) + "\n"

    async def answer(self, agent: Agent, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One HTTP/1.0 exchange: GET /metrics."""
        with contextlib.suppress(ConnectionError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(_ANSWER_SECONDS):
                request = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n", 1)[0]
                is_known = request.startswith(b"GET /metrics ")
                lines = [*await agent.balancer_counts.lines(), *await storage_metrics.lines(agent)] if is_known else []
                body = (self.text(agent) + "".join(f"{line}\n" for line in lines)).encode() if is_known else b""
                status = b"200 OK" if is_known else b"404 Not Found"
                head = b"HTTP/1.0 %s\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: %d\r\n\r\n"
                writer.write(head % (status, len(body)) + body)
                await writer.drain()
        writer.close()


def _flow_lines() -> list[str]:
    table = flow_table()
    return [
        "# TYPE bedplate_agent_flows gauge",
        f"bedplate_agent_flows {table.count}",
        "# TYPE bedplate_agent_flows_limit gauge",
        f"bedplate_agent_flows_limit {table.limit}",
        "# TYPE bedplate_agent_flows_refused_total counter",
        f"bedplate_agent_flows_refused_total {table.refused}",
        "# TYPE bedplate_agent_flows_evicted_total counter",
        f"bedplate_agent_flows_evicted_total {table.evicted}",
    ]


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")
