"""What the command line tells while it waits, against a real API."""

from __future__ import annotations

from tests.api.test_cli import api, bedplate, home, server_url

__all__ = ["api", "bedplate", "home", "server_url"]


def test_says_meanwhile_and_at_the_end_what_is_in_the_way(api, bedplate):
    """Nobody carries a load balancer where no host has the role; no worker runs here, so it never gets ready."""
    bedplate("project", "create", "ours")
    assert bedplate("network", "create", "net", "--project", "ours").code == 0
    ran = bedplate(
        "lb", "create", "front", "--listen", "80", "--network", "net", "--project", "ours", "--timeout", "4s"
    )  # fmt: skip
    assert ran.code == 7, ran.err
    before, _, end = ran.err.partition("not done within 4s")
    assert before.count("loadbalancer.no_edge: No host with role edge is ready") == 1
    assert "loadbalancer.no_edge: No host with role edge is ready" in end
