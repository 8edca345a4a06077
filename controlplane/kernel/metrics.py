"""The kernel's Prometheus metrics; names are a contract (docs/reference/metrics)."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

STEPS = Counter("bedplate_run_steps_total", "Steps run, by how they ended.", ["program", "step", "outcome"])
STEP_SECONDS = Histogram(
    "bedplate_run_step_seconds",
    "Seconds one try of a step took.",
    ["program", "step"],
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60, 300),
)
OVERDUE = Gauge("bedplate_runs_overdue", "Runs of this process's shards that are past their step's deadline.")
LEASE_LOST = Counter("bedplate_lease_lost_total", "Runs that another worker took over while a step of ours was at work.")
DEADLINE_MISSED = Counter("bedplate_deadline_missed_total", "Steps that were not left in time.", ["program", "step"])
