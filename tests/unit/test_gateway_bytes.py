"""Bodies are changed only where they must be; streams leave as they came, however they were cut."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from controlplane.gateway.body import replace_member
from controlplane.gateway.bucket import Bucket, duration
from controlplane.gateway.stream import EventStream, UsageForm

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20
)
documents = st.dictionaries(st.text() | st.just("model"), values, max_size=6)
layouts = st.sampled_from([None, 1, "\t"]), st.sampled_from([(",", ":"), (" , ", " : ")]), st.booleans()


@given(documents, *layouts)
def test_replace_member_changes_that_member_alone(document, indent, separators, is_ascii) -> None:
    body = json.dumps(document, indent=indent, separators=separators, ensure_ascii=is_ascii).encode()
    if not document:
        return
    changed = replace_member(body, "model", b'"new"')
    assert json.loads(changed) == {**document, "model": "new"}
    if "model" in document:
        old = json.dumps(document["model"], indent=indent, separators=separators, ensure_ascii=is_ascii).encode()
        assert len(changed) == len(body) - len(old) + len(b'"new"') or indent is not None
    else:
        assert changed.endswith(body[1:])


def test_every_duplicate_is_replaced() -> None:
    """Parsers disagree on which of two members counts, so both say the same."""
    body = rb'{"model":"a","x":{"model":"b"},"mo\u0064el":["c"]}'
    assert replace_member(body, "model", b'"n"') == rb'{"model":"n","x":{"model":"b"},"mo\u0064el":"n"}'


EVENTS = [
    b": ping\n\n",
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"\xc3\xa9"}}]}\n\n',
    b'data: {"choices":[{"delta":{"reasoning":"x"}}]}\r\n\r\n',
    b"event: odd\ndata: not json\n\n",
    b"data: " + b"y" * 70_000 + b"\n\n",
    b'data: {"choices":[{"text":"z"}]}\n\n',
]
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":9,"prompt_tokens_details":{"cached_tokens":2}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


@given(st.lists(st.sampled_from(EVENTS), max_size=8), st.lists(st.integers(1, 80_000), max_size=12))
def test_any_cut_gives_the_same_stream(events, cuts) -> None:
    whole = b"".join(events) + USAGE + DONE
    stream = EventStream(UsageForm.NONE, is_running_total=False)
    out, start = b"", 0
    for cut in [*sorted(cuts), len(whole)]:
        out += stream.feed(whole[start:cut])
        start = max(start, min(cut, len(whole)))
    assert out + stream.rest() == b"".join(events) + DONE
    assert stream.is_done
    assert (stream.tokens.prompt, stream.tokens.completion, stream.tokens.cached, stream.tokens.is_exact) == (5, 9, 2, True)


def test_byte_by_byte() -> None:
    whole = b"".join(EVENTS[:5]) + USAGE + DONE
    for form, expected in ((UsageForm.NONE, b"".join(EVENTS[:5]) + DONE), (UsageForm.VERBATIM, whole)):
        stream = EventStream(form, is_running_total=False)
        assert b"".join(stream.feed(whole[i : i + 1]) for i in range(len(whole))) == expected
        assert stream.tokens.prompt == 5


def test_tokens_are_counted_when_the_engine_tells_none() -> None:
    stream = EventStream(UsageForm.NONE, is_running_total=False)
    for event in EVENTS:
        stream.feed(event)
    assert (stream.tokens.completion, stream.tokens.is_exact, stream.has_tokens) == (3, False, True)


def test_a_comment_line_does_not_wait_for_its_event() -> None:
    stream = EventStream(UsageForm.NONE, is_running_total=False)
    assert stream.feed(b": waiting\n") == b": waiting\n"
    assert stream.feed(b"\n" + USAGE) == b"\n"
    assert stream.feed(b": waiting\ndata: {") == b""


def test_bucket() -> None:
    bucket = Bucket("name", "requests per minute", 60, 0.0)
    assert bucket.remaining(0.0) == 60
    for _ in range(60):
        assert bucket.wait_alone(1, 1, 0.0) == 0
        bucket.take_alone(1, 1, 0.0)
    assert round(bucket.wait_alone(1, 1, 0.0), 6) == 1.0
    assert bucket.remaining(0.0) == 0
    assert bucket.wait_alone(1, 1, 1.0) == 0
    bucket.take_alone(-60, 1, 1.0)
    assert bucket.remaining(1.0) == 60
    assert bucket.reset(1.0) == 0.0
    assert bucket.wait_alone(1_000_000, 1, 1.0) == 0, "what is larger than the bucket fits when it is full"


def test_a_bucket_divided() -> None:
    """One of three gateways on its own gets a third of what is left, and a third of the rate."""
    bucket = Bucket("name", "requests per minute", 60, 0.0)
    bucket.seen(30_000_000, 0.0)
    passed = 0
    while not bucket.wait_alone(1, 3, 0.0):
        bucket.take_alone(1, 3, 0.0)
        passed += 1
    assert passed == 10
    assert round(bucket.wait_alone(1, 3, 0.0), 6) == 3.0


def test_durations_as_go_writes_them() -> None:
    written = {
        0: "0s",
        0.0171: "17ms",
        1: "1s",
        1.5: "1.5s",
        59.999: "59.999s",
        360: "6m0s",
        3600: "1h0m0s",
        3661.25: "1h1m1.25s",
    }
    assert {seconds: duration(seconds).decode() for seconds in written} == written
