"""Converts the engine's metrics to a list of named gauges and counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PREFIX = "compiled_engine:"
# Key of LLM.metrics() -> the metric's name after the prefix. Metrics that vLLM also has carry vLLM's name.
GAUGES = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "kv_usage": "kv_cache_usage_perc",
}
COUNTERS = {
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
# Key -> name and label, for counters with one value per label value.
LABELLED = {"accepted_by_position": ("spec_decode_num_accepted_tokens_per_pos", "position")}


@dataclass(frozen=True)
class Metric:
    """A named metric value."""

    name: str
    kind: str  # "gauge" or "counter", which only grows
    value: int | float
    labels: dict[str, str] = field(default_factory=dict)  # the position of a draft


def metric_list(metrics: Mapping[str, Any]) -> list[Metric]:
    """Return the most common metrics as a list. `metrics` is the result of `LLM.metrics`."""
    kinds = (("gauge", GAUGES), ("counter", COUNTERS))
    found = [Metric(PREFIX + name, kind, metrics[key]) for kind, names in kinds for key, name in names.items()]
    for key, (name, label) in LABELLED.items():
        found += [Metric(PREFIX + name, "counter", count, {label: value}) for value, count in metrics[key].items()]
    return found
