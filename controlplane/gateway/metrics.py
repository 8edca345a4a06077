"""The gateway's Prometheus metrics. The one rule: a label value is never text that a client can choose freely."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

UNKNOWN = "unknown"
_TTFT_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 3, 5, 10, 30, 60, 120, 300)
_TPOT_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)


class Metrics:
    def __init__(self) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "bedplate_gateway_requests", "Requests answered, by public model name.", ["model", "status"], registry=self.registry
        )
        self.tokens = Counter(
            "bedplate_gateway_tokens", "Tokens by kind: prompt, completion.", ["model", "kind"], registry=self.registry
        )
        self.ttft = Histogram(
            "bedplate_gateway_ttft_seconds", "Arrival to first token, streams.", registry=self.registry, buckets=_TTFT_BUCKETS
        )
        self.tpot = Histogram(
            "bedplate_gateway_tpot_seconds", "Seconds a token after the first.", registry=self.registry, buckets=_TPOT_BUCKETS
        )
        self.inflight = Gauge("bedplate_gateway_inflight", "Requests at replicas now.", registry=self.registry)
        self.queue_depth = Gauge("bedplate_gateway_queue_depth", "Requests waiting for a replica.", registry=self.registry)
        self.unlanded = Gauge(
            "bedplate_gateway_journal_bytes", "Bytes of usage journal on disk, not yet in the database.", registry=self.registry
        )
        self.database_up = Gauge(
            "bedplate_gateway_database_up", "1 while keys and routes can be refreshed.", registry=self.registry
        )

    def render(self) -> bytes:
        return generate_latest(self.registry)
