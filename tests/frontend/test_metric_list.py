"""Figures of an engine as a list: each has its own value, and its kind says whether it may go down."""

from __future__ import annotations

from typing import Any

from compiled_engine.frontend.metric_list import Metric, metric_list


def test_each_figure_has_its_name_kind_and_value() -> None:
    gauges = {"running": "num_requests_running", "waiting": "num_requests_waiting", "kv_usage": "kv_cache_usage_perc"}
    counters = {
        "prefix_queries": "prefix_cache_queries",
        "prefix_hits": "prefix_cache_hits",
        "preemptions": "num_preemptions",
        "finished": "request_success",
        "aborted": "request_aborted",
        "steps": "num_steps",
        "compiles": "num_compiles",
        "captures": "num_graph_captures",
        "drafted_requests": "spec_decode_num_drafts",
        "draft_tokens": "spec_decode_num_draft_tokens",
        "accepted_tokens": "spec_decode_num_accepted_tokens",
    }
    metrics: dict[str, Any] = {name: number + 1 for number, name in enumerate(gauges | counters)}
    metrics |= {"something else": 99, "accepted_by_position": {"0": 5, "1": 0}}
    by_position = "compiled_engine:spec_decode_num_accepted_tokens_per_pos"
    assert metric_list(metrics) == [
        *(Metric(f"compiled_engine:{name}", "gauge", metrics[key]) for key, name in gauges.items()),
        *(Metric(f"compiled_engine:{name}", "counter", metrics[key]) for key, name in counters.items()),
        Metric(by_position, "counter", 5, {"position": "0"}),
        Metric(by_position, "counter", 0, {"position": "1"}),
    ]
