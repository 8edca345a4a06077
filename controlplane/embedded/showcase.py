"""The steps of the demo, one function each, in the order of the story.

The one rule: they talk to the REST API and the gateway as a tenant or operator does, and never to a table or a host's agent.
"""

from __future__ import annotations

from controlplane.embedded.stage import Stage


async def run(stage: Stage) -> dict[str, object]:
    """All steps; returns question and answer."""
    with stage.timeline.step("Start the control plane") as step:
        await stage.start_control_plane()
        step.note(stage.api_url)
    with stage.timeline.step("Make lab hosts") as step:
        lab = await stage.start_lab()
        step.note(", ".join(f"{host.name} {host.address}" for host in lab.hosts))
    return {"question": None, "answer": None}
