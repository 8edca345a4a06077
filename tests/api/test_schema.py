"""Made-up requests over the whole OpenAPI document against the real API: no failure inside, no answer that is not declared."""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.failures import FailureGroup

from controlplane.api import reference
from tests.api.test_cli import api, bedplate, home, server_url

__all__ = ["api", "bedplate", "home", "server_url"]

EXAMPLES = {GenerationMode.POSITIVE: 2, GenerationMode.NEGATIVE: 1}
MOST_SECONDS = 60  # of work, which a busy machine does not make more
ENDLESS = {"events_list"}
load_all_checks()
WANTED = [
    CHECKS.get_one(name)
    for name in ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
]
BOUNDED = settings(
    deadline=None,
    database=None,
    derandomize=True,  # what fails here fails for everybody
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def asked_of(operation, mode: GenerationMode, ask) -> str:
    """What was found wrong with the answers to made-up requests of one kind; empty for nothing."""

    @settings(BOUNDED, max_examples=EXAMPLES[mode])
    @given(case=operation.as_strategy(generation_mode=mode))
    def tried(case) -> None:
        if "project" in (case.path_parameters or {}):
            case.path_parameters["project"] = "ours"
        case.validate_response(ask(case), checks=WANTED)

    try:
        tried()
    except Unsatisfiable:
        return "" if mode is GenerationMode.NEGATIVE else "nothing can be asked"
    except (FailureGroup, Exception) as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_failure_inside_and_no_answer_that_is_not_declared(api, bedplate, home):
    """As an operator, for whom nothing is refused for want of rights; in a project that is there."""
    bedplate("project", "create", "ours")
    headers = {"authorization": f"Bearer {(home / 'state/operator-token').read_text().strip()}"}
    schema = schemathesis.openapi.from_dict(json.loads(reference.openapi()))
    found, answered, began = [], Counter(), time.process_time()
    with requests.Session() as session:
        session.trust_env = False

        def ask(case):
            answer = case.call(base_url=api.url, session=session, headers=headers, allow_redirects=False, timeout=30)
            answered[answer.status_code // 100] += 1
            return answer

        for result in schema.get_all_operations():
            operation = result.ok()
            name = operation.definition.raw["operationId"]
            assert time.process_time() - began < MOST_SECONDS, f"too slow: stopped before {name} after {answered}"
            for mode in EXAMPLES if name not in ENDLESS else ():
                if wrong := asked_of(operation, mode, ask):
                    found.append(f"{name}: {wrong}")
    assert not found, "\n\n".join(found)
    assert answered[2] > 20, answered
