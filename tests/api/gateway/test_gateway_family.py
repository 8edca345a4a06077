"""What engines say that they used: read as it is meant, and left alone where it cannot be true."""

from __future__ import annotations

import pytest

from controlplane.gateway.body import understand
from controlplane.gateway.directory import Price
from controlplane.gateway.family import Tokens
from controlplane.gateway.problem import Problem


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 7, "completion_tokens": 3}, (7, 3, 0)),
        ({"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}, (7, 3, 5)),
        ({"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 50}}, (7, 3, 7)),
        ({"input_tokens": 10, "output_tokens": 4, "cache_read_input_tokens": 900}, (910, 4, 900)),
        (
            {"input_tokens": 10, "output_tokens": 4, "cache_read_input_tokens": 900, "cache_creation_input_tokens": 90},
            (1000, 4, 900),
        ),
        ({"prompt_tokens": -1, "completion_tokens": 3}, (None, 0, 0)),
        ({"prompt_tokens": 10**30, "completion_tokens": 3}, (None, 0, 0)),
        ({"prompt_tokens": True, "completion_tokens": 3}, (None, 0, 0)),
        ({"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": -4}}, (7, 3, 0)),
    ],
)
def test_usage_is_read_in_both_forms_and_nonsense_is_left_alone(usage, expected):
    tokens = Tokens()
    tokens.read(usage)
    assert (tokens.prompt, tokens.completion, tokens.cached) == expected
    assert Price(prompt=3, cached=1, completion=9).of(tokens.prompt or 0, tokens.cached, tokens.completion) >= 0


@pytest.mark.parametrize("name", ["stream", "stream_options"])
def test_what_the_gateway_must_know_is_not_for_ext_params(name):
    with pytest.raises(Problem) as refused:
        understand(b'{"model":"a","ext_params":{"%s":true}}' % name.encode())
    assert b'"param":"ext_params"' in refused.value.body()


def test_a_limit_in_ext_params_is_reserved_too():
    assert understand(b'{"model":"a","ext_params":{"max_tokens":200000}}').max_tokens == 200_000
