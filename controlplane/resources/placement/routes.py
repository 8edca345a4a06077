"""Placements over HTTP, for operators; members read what runs short in the 507 of their own request."""

from __future__ import annotations

from controlplane.api.frame import Call, Noun
from controlplane.placement.explain import explain, verdicts
from controlplane.placement.request import PlacementRequest
from controlplane.resources.placement.schemas import ExplanationView, PlacementQuery, ShortView, VerdictView

noun = Noun("placement", "placements", in_project=False, has_operations=False)
router = noun.router


@noun.route("POST", "/explain", "explain", ExplanationView)
async def explain_placement(call: Call, body: PlacementQuery) -> ExplanationView:
    """Say where a machine would fit now, and what runs short where it would not. Nothing is made or reserved."""
    request = PlacementRequest(
        vcpus=body.vcpus,
        memory_bytes=body.memory_bytes,
        isolation=body.isolation,
        architecture=body.architecture,
        labels=body.host_labels,
        location=body.location,
    )
    explanation = await explain(call.session, request)
    found = await verdicts(call.session, request)
    return ExplanationView(
        hosts=explanation.hosts,
        fitting=explanation.fitting,
        detail=explanation.sentence,
        short=[ShortView.model_validate(item) for item in explanation.short],
        verdicts=[VerdictView.model_validate(item) for item in found],
    )
