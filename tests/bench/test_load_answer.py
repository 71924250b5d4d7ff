"""What a load test makes of streamed answers: their records, and the figures of a run."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_engine.bench.serving.client import AnswerReader, Record, Report
from compiled_engine.bench.serving.figures import figures_of, notes

USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": value, "finish_reason": None, **more}]}


def events(*values: Any, end: str = "\n\n") -> bytes:
    data = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return "".join(f"data: {each}{end}" for each in data).encode()


def read(*pieces: bytes, status: int = 200) -> Record:
    """Piece i comes at i + 1 seconds; the run began at 0."""
    record = Record(0, 0.0, sent=0.5)
    reader = AnswerReader(record, 0.0)
    for place, piece in enumerate(pieces):
        reader.feed(piece, place + 1.0)
    reader.finish(status, len(pieces) + 1.0)
    return record


def test_usage_counts_tokens_and_parts_with_output_have_times() -> None:
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    thought = {"choices": [{"delta": {"reasoning_content": "h"}}]}
    call = {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}
    last = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    record = read(*(events(each) for each in (role, thought, call, last, USAGE, "[DONE]")))
    assert (record.error, record.chunk_times, record.end) == (None, [2.0, 3.0], 7.0)
    assert (record.output_tokens, record.counted_by, record.prompt_tokens) == (5, "usage", 7)


def test_without_usage_token_ids_count_and_without_these_parts() -> None:
    with_ids = read(events(text("ab", token_ids=[1, 2]), text("", token_ids=[3]), "[DONE]"))
    assert (with_ids.output_tokens, with_ids.counted_by) == (3, "token_ids")
    without = read(events(text("a"), text("bc"), text(""), "[DONE]").rstrip())  # the last line has no end
    assert (without.output_tokens, without.counted_by, without.prompt_tokens) == (2, "chunks", None)


@given(st.data(), st.sampled_from(["\n\n", "\r\n\r\n"]))
def test_pieces_do_not_matter(data: st.DataObject, end: str) -> None:
    whole = b": comment" + end.encode() + events(text("é"), text("b"), USAGE, "[DONE]", end=end)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=5)))
    borders = [0, *cuts, len(whole)]
    record = read(*(whole[a:b] for a, b in pairwise(borders)))
    assert (record.error, record.output_tokens, len(record.chunk_times)) == (None, 5, 2)


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (b'{"error": {"message": "busy"}}', 503, "HTTP 503"),
        (events(text("a")), 200, "incomplete stream"),
        (events(text("a"), {"error": {"message": "lost"}}, "[DONE]"), 200, "error event"),
        (events("{", "[DONE]"), 200, "malformed event"),
        (events(text(""), "[DONE]"), 200, "no output"),
    ],
)
def test_what_is_no_whole_answer_is_counted_by_kind(body: bytes, status: int, kind: str) -> None:
    record = read(body, status=status)
    assert record.error == kind
    assert record.message


def report(*records: Record, cpu_s: float = 0.1, lag_s: float = 0.0, late_s: float = 0.0) -> Report:
    return Report(list(records), cpu_s=cpu_s, wall_s=1.0, lags_s=[lag_s], late_s=[late_s])


def test_figures_are_what_their_names_say() -> None:
    first = Record(0, 0.0, 0.0, 2.1, [0.5, 1.0, 2.0], 10, 3, "usage")
    second = Record(1, 1.0, 1.0, 4.0, [2.0, 4.0], 20, 5, "usage")
    single = Record(2, 1.0, 1.0, 1.2, [1.2], 5, 1, "usage")
    failed = Record(3, 1.0, 1.0, 1.5, error="HTTP 503", message="busy")
    found = figures_of([report(second, failed), report(first, single)], {"ttft": 500.0, "tpot": 750.0}, (90.0,))
    assert (found["requests"], found["completed"], found["errors"]) == (4, 3, {"HTTP 503": 1})
    assert found["first_errors"] == {"HTTP 503": "busy"}
    assert (found["duration_s"], found["prompt_tokens"], found["output_tokens"]) == (4.0, 35, 9)
    assert (found["request_throughput"], found["output_throughput"]) == (0.75, 2.25)
    assert found["total_token_throughput"] == 11.0
    assert found["tokens_per_chunk"] == 1.5
    assert found["ttft_ms"]["median"] == 500
    assert found["tpot_ms"]["mean"] == (750 + 500) / 2  # the single token has none
    assert found["itl_ms"]["quantiles"][0] == 500
    assert found["itl_ms"]["max"] == 2000
    assert found["e2el_ms"]["max"] == 3000
    assert found["mean_concurrency"] == pytest.approx((2 + 3 + 0.2) / 4)
    assert found["goodput"] == {"bounds_ms": {"ttft": 500.0, "tpot": 750.0}, "share": 0.5, "request_throughput": 0.5}
    course = found["timeline"]
    assert sum(course["output_throughput"]) * 4.0 / len(course["seconds"]) == pytest.approx(9, abs=0.1)
    assert max(course["concurrency"]) == 3
    assert notes([found | {"name": "run"}]) == [
        "Up to 1.50 tokens a part: ITL is the time between parts, TPOT that of a token."
    ]


def test_a_run_without_an_answer_has_no_latencies() -> None:
    found = figures_of([report(Record(0, 0.0, error="no connection"))], {}, ())
    assert (found["completed"], found["output_throughput"], found["ttft_ms"], found["goodput"]) == (0, 0, None, None)


@pytest.mark.parametrize(
    ("cpu_s", "lag_s", "late_s", "suspect"),
    [(0.5, 0.001, 0.001, False), (0.95, 0.001, 0.0, True), (0.1, 0.5, 0.0, True), (0.1, 0.001, 0.5, True)],
)
def test_a_client_at_its_limits_says_so(cpu_s: float, lag_s: float, late_s: float, suspect: bool) -> None:
    record = Record(0, 0.0, 0.0, 1.0, [0.5], 1, 1, "chunks")
    found = figures_of([report(record), report(record, cpu_s=cpu_s, lag_s=lag_s, late_s=late_s)], {}, ())
    assert found["client"]["is_suspect"] == suspect
    said = notes([found | {"name": "run"}])
    assert any("the client may be the limit" in note for note in said) == suspect
    assert any("--client-processes" in note for note in said) == (cpu_s == 0.95)
