"""Metrics of requests and responses, and figures that several processes share."""

from __future__ import annotations

import os
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from compiled_engine.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from compiled_engine.sampling.params import SamplingParams
from compiled_engine.server import metrics as metrics_module
from compiled_engine.server.exposition import exposition
from compiled_engine.server.metrics import ServerMetrics
from compiled_engine.server.serving import Admission
from compiled_engine.server.shared_figures import SharedFigures


def part(tokens: list[int], finish_reasons: list[str | None], times: RequestMetrics | None = None) -> RequestOutput:
    """The next part of each completion: so many tokens, and how it ended."""
    completions = [
        CompletionOutput(index, "", [5] * number, None, None, reason, None)
        for index, (number, reason) in enumerate(zip(tokens, finish_reasons, strict=True))
    ]
    return RequestOutput("0", None, [1] * 3, None, completions, None not in finish_reasons, 2, times)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds pass as `now` is set."""
    found = SimpleNamespace(now=0.0)
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(perf_counter=lambda: found.now))
    return found


def sums(metrics: ServerMetrics, name: str) -> tuple[float, float]:
    """Return the number of values of a histogram, and their sum."""
    histogram = metrics.histograms[name]
    return histogram.buckets()[-1][1], histogram.sum


GAPS = "inter_token_latency_seconds"


def test_gaps_between_the_tokens_of_a_stream_are_observed_as_they_come(clock: SimpleNamespace) -> None:
    """Tokens that come together share their gap; what has no token has none, and the first has none before it."""
    metrics = ServerMetrics(SharedFigures(), ["/"])
    request = metrics.request(SamplingParams(max_tokens=9))
    times = RequestMetrics(0.0, 1.0, 3.0, 11.0, 16.0, num_generation_tokens=6)
    for now, tokens, reason in ((1.0, 1, None), (1.5, 1, None), (2.5, 4, None), (3.0, 0, "stop")):
        clock.now = now
        request.output(part([tokens], [reason], times if reason else None))
    assert sums(metrics, GAPS) == (5, 1.5)
    buckets = dict(metrics.histograms[GAPS].buckets())
    assert (buckets["0.2"], buckets["0.3"], buckets["0.5"]) == (0, 4, 5)
    assert sums(metrics, "request_generation_tokens") == (1, 6)


def test_gaps_of_several_completions_are_their_mean(clock: SimpleNamespace) -> None:
    """Tokens of others come between, so that the times at which one's come say nothing."""
    metrics = ServerMetrics(SharedFigures(), ["/"])
    request = metrics.request(SamplingParams(n=2, max_tokens=9))
    times = RequestMetrics(0.0, 1.0, 3.0, 11.0, 16.0, num_generation_tokens=5)
    for now, reason in ((1.0, None), (2.0, None), (5.0, "length")):
        clock.now = now
        request.output(part([1, 1], [reason, reason], times if reason else None))
    assert sums(metrics, GAPS) == (4, 13.0)  # from the first token to the end, as the engine has seen them
    assert sums(metrics, "request_generation_tokens") == (1, 6)
    assert metrics.finish_reasons.totals() == {"stop": 0, "length": 2, "error": 0, "abort": 0}


@pytest.mark.parametrize("refused", [False, True])
def test_a_request_that_ends_early_is_counted_once(clock: SimpleNamespace, refused: bool) -> None:
    """By its completions that have not ended, unless it never began."""
    metrics = ServerMetrics(SharedFigures(), ["/"])
    request = metrics.request(SamplingParams(n=3))
    if refused:
        request.refused()
    else:
        request.output(part([1, 1, 1], ["stop", None, None]))
    for _ in range(2):
        request.end()
    assert metrics.finish_reasons.totals() == {
        **{"stop": int(not refused), "length": 0, "error": 0},
        "abort": 0 if refused else 2,
    }
    assert metrics.tokens.totals() == {"prompt_tokens": 0, "prompt_tokens_cached": 0}


def test_times_that_there_are_not_are_not_observed(clock: SimpleNamespace) -> None:
    metrics = ServerMetrics(SharedFigures(), ["/"])
    request = metrics.request(SamplingParams(max_tokens=None))
    request.output(part([1], ["stop"], RequestMetrics(1.0, None, None, None, 4.0, num_generation_tokens=1)))
    request.end()
    observed = {name for name in metrics.histograms if sums(metrics, name)[0]}
    assert observed == {
        *("request_params_n", "request_prompt_tokens", "request_generation_tokens", "e2e_request_latency_seconds")
    }
    assert sums(metrics, "e2e_request_latency_seconds") == (1, 3.0)


def test_results_of_pooling_are_counted() -> None:
    metrics = ServerMetrics(SharedFigures(), ["/"])
    outputs: Any = [
        SimpleNamespace(prompt_token_ids=[1] * length, num_cached_tokens=cached)
        for length, cached in ((3, 2), (7, None))
    ]
    metrics.pooled(outputs, 0.25)
    assert metrics.tokens.totals() == {"prompt_tokens": 10, "prompt_tokens_cached": 2}
    assert metrics.finish_reasons.totals()["stop"] == 2
    assert sums(metrics, "request_prompt_tokens") == (2, 10)
    assert sums(metrics, "e2e_request_latency_seconds") == (1, 0.25)


def shown(metrics: ServerMetrics, engine: dict[str, Any]) -> dict[tuple[str, ...], float]:
    """Samples by their names and the values of their labels, in the order of these, besides the model's."""
    serving: Any = SimpleNamespace(
        names=("small", "other"),
        metrics=metrics,
        admission=SimpleNamespace(in_flight=4, refused=2),
        options=SimpleNamespace(vllm_metric_names=False),
        adapters={"a": object(), "b": object()},
    )
    text = exposition(serving, engine).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {key: value for key, value in sorted(sample.labels.items()) if key != "model_name"}
            assert sample.labels.get("model_name", "small") == "small"
            found[(sample.name.removeprefix("compiled_engine:"), *labels.values())] = sample.value
    return found


def test_responses_are_counted_by_route_and_status() -> None:
    """Only those that occurred are shown; unusual statuses share one name."""
    metrics = ServerMetrics(SharedFigures(), ["/a", "/b"])
    for route, status in (("/a", 200), ("/a", 200), ("/b", 404), ("/b", 418), ("/b", 507)):
        metrics.response(route, status)
    found = shown(metrics, {})
    responses = {key[1:]: value for key, value in found.items() if key[0] == "http_responses_total"}
    assert responses == {("/a", "200"): 2, ("/b", "404"): 1, ("/b", "other"): 2}
    assert (found[("completions_in_flight",)], found[("busy_refusals_total",)]) == (4, 2)


# The engine's figures, by the names under which they are shown.
FIGURES = {
    **{"running": "num_requests_running", "waiting": "num_requests_waiting", "kv_usage": "kv_cache_usage_perc"},
    **{"resting": "spec_decode_num_requests_resting", "api_processes": "api_processes"},
    **{"blocks_total": "kv_cache_blocks", "graph_bytes_used": "graph_memory_bytes"},
    **{"graph_bytes_predicted": "graph_memory_predicted_bytes", "capture_seconds": "graph_capture_seconds"},
    **{"start_s": "engine_start_seconds", "prefix_queries": "prefix_cache_queries_total"},
    **{"prefix_hits": "prefix_cache_hits_total", "generated_tokens": "generation_tokens_total"},
    **{"preemptions": "num_preemptions_total", "steps": "num_steps_total", "traces": "num_traces_total"},
    **{"compiles": "num_compiles_total", "captures": "num_graph_captures_total"},
    **{"recordings": "num_recordings_total", "recorded_replays": "num_recorded_replays_total"},
    **{"grammar_requests": "grammar_requests_total", "grammar_compiles": "grammar_compiles_total"},
    **{"grammar_failures": "grammar_failures_total", "grammar_cache_hits": "grammar_cache_hits_total"},
    **{"grammar_compile_s": "grammar_compile_seconds_total", "graph_padded_tokens": "graph_padded_tokens_total"},
    **{"drafted_requests": "spec_decode_num_drafts_total", "draft_tokens": "spec_decode_num_draft_tokens_total"},
    **{"accepted_tokens": "spec_decode_num_accepted_tokens_total", "rested": "spec_decode_num_requests_rested_total"},
}
LABELLED = {
    **{"graph_replays_by_key": "graph_replays_total", "graph_fallbacks_by_reason": "graph_fallbacks_total"},
    **{"accepted_by_position": "spec_decode_num_accepted_tokens_per_pos_total"},
    **{"draft_lengths": "spec_decode_num_steps_total", "adapter_requests": "adapter_requests_total"},
    **{"draft_sharpness_shares": "spec_decode_draft_sharpness_acceptance_rate"},
    **{"draft_length_chosen": "spec_decode_chosen_num_drafts"},
    **{"adapter_requests_running": "adapter_requests_running", "adapter_requests_waiting": "adapter_requests_waiting"},
}


def test_each_figure_of_the_engine_has_a_name_of_its_own() -> None:
    numbers = count(1)
    engine: dict[str, Any] = {key: float(next(numbers)) for key in FIGURES}
    engine |= {key: {"a": float(next(numbers)), "b": float(next(numbers))} for key in LABELLED}
    found = shown(ServerMetrics(SharedFigures(), ["/"]), engine)
    assert {key: found[(name,)] for key, name in FIGURES.items()} == {key: engine[key] for key in FIGURES}
    assert {key: {label: found[(name, label)] for label in "ab"} for key, name in LABELLED.items()} == {
        key: engine[key] for key in LABELLED
    }
    without = shown(ServerMetrics(SharedFigures(), ["/"]), {})
    assert not {name for name, *_ in without} & {*FIGURES.values(), *LABELLED.values()}


def test_further_figures_of_the_engine() -> None:
    replica = {"running": 1, "waiting": 2, "kv_usage": 0.5, "generated_tokens": 7, "prefix_hits": 3}
    engine: dict[str, Any] = {
        "passes": {"1-8": {"silu_mul": {"matches": 4}}},
        "start_up_seconds": {"trace": 1.5},
        **{"cache": "hit", "cache_why": "found"},
        "draft_shares": [0.75, 0.5],
        "draft_step_ms": {"8": {"2": 250.0}},
        "draft_sharpness": "1.25",
        **{"requests_queued": 3, "requests_rerun": 4},
        "replicas": [
            {"replica": 0, "lives": True, **replica},
            {"replica": 1, "lives": False, **replica, "generated_tokens": 9},
        ],
    }
    found = shown(ServerMetrics(SharedFigures(), ["/"]), engine)
    expected = {
        ("pass_matches", "silu_mul", "1-8"): 4,
        ("start_up_seconds", "trace"): 1.5,
        ("compile_cache_info", "hit", "found"): 1,
        ("spec_decode_acceptance_rate_per_pos", "0"): 0.75,
        ("spec_decode_acceptance_rate_per_pos", "1"): 0.5,
        ("spec_decode_step_seconds", "8", "2"): 0.25,
        ("spec_decode_draft_sharpness", "1.25"): 1,
        ("replica_up", "0"): 1,
        ("replica_up", "1"): 0,
        ("replica_requests_running", "0"): 1,
        ("replica_generation_tokens_total", "1"): 9,
        ("replica_prefix_cache_hits_total", "0"): 3,
    }
    assert {key: found.get(key) for key in expected} == expected


def test_processes_count_in_rows_of_their_own() -> None:
    """Each reads the sum. What a process had under way is forgotten with it, what it counted stays."""
    first = SharedFigures(3, 0)
    assert first.descriptor is not None
    second, third = (SharedFigures(3, own, os.dup(first.descriptor)) for own in (1, 2))
    columns = [figures.reserve(2) for figures in (first, second, third)]
    assert columns == [0, 0, 0]
    assert first.reserve(1) == 2
    for number, figures in enumerate((first, second, third)):
        figures.own[0] += 10**number
        figures.own[1] += 2 * 10**number
    for figures in (first, second, third):
        assert figures.totals([0, 1]) == [111, 222]
        assert figures.total(1) == 222
    assert sorted(second.of_others(0)) == [1, 100]
    assert [first.of(number, 1) for number in range(3)] == [2, 20, 200]
    first.forget(2, 0)
    assert second.totals([0, 1]) == [11, 222]


def test_the_bound_of_completions_is_that_of_all_processes() -> None:
    figures = SharedFigures(2, 0)
    assert figures.descriptor is not None
    other = SharedFigures(2, 1, os.dup(figures.descriptor))
    own, others = Admission(3, figures), Admission(3, other)
    with own.admit(2), others.admit(1):
        assert own.in_flight == others.in_flight == 3
        with pytest.raises(Exception, match="3 completions are under way, and it takes 3"), own.admit(1):
            pass
        assert (others.refused, others.in_flight) == (1, 3)
        own.forget(1)
        assert own.in_flight == 2
    assert own.in_flight == -1  # what was forgotten of the other, which has not ended
