"""The figures of several replicas as those of one engine, and some of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from compiled_engine.core_process.replica import Replica

# What adds up. Of those that ended, what they have counted stays; what they held does not.
COUNTED = (
    *("generated_tokens", "steps", "finished", "aborted", "preemptions", "prefix_queries", "prefix_hits"),
    *("traces", "compiles", "captures", "graph_replays", "graph_padded_tokens", "graph_fallbacks"),
    *("recordings", "recorded_replays"),
    *("grammar_requests", "grammar_compiles", "grammar_failures", "grammar_compile_s", "grammar_cache_hits"),
)
HELD = (
    *("running", "waiting", "blocks_total", "blocks_free", "kv_cache_bytes"),
    *("graph_bytes_used", "graph_bytes_predicted"),
)
COUNTED_BY_NAME = ("graph_replays_by_key", "graph_fallbacks_by_reason")
OF_EACH = ("running", "waiting", "kv_usage", "prefix_queries", "prefix_hits", "generated_tokens", "steps", "start_s")


def metrics_of_all(replicas: Sequence[Replica]) -> dict[str, Any]:
    """From what each has answered last; at least one lives."""
    answers = [replica.metrics for replica in replicas if replica.metrics]
    living = [replica.metrics for replica in replicas if replica.dead is None and replica.metrics]
    found = dict((living or answers)[0])
    for names, those in ((COUNTED, answers), (HELD, living)):
        found |= {name: sum(each[name] for each in those) for name in names if all(name in each for each in those)}
    for name in COUNTED_BY_NAME:
        found[name] = dict(sum((Counter(each[name]) for each in answers), Counter()))
    found["kv_usage"] = 1 - found["blocks_free"] / found["blocks_total"] if found["blocks_total"] else 0.0
    found["kv_usage_peak"] = max(each["kv_usage_peak"] for each in answers)
    return found | {"replicas": [_of_one(replica) for replica in replicas]}


def _of_one(replica: Replica) -> dict[str, Any]:
    of_metrics = {name: replica.metrics[name] for name in OF_EACH if name in replica.metrics}
    if replica.dead is not None:
        of_metrics |= {"running": 0, "waiting": 0, "kv_usage": 0.0}
    return {"replica": replica.number, "lives": replica.dead is None, "ended": replica.dead, **of_metrics}
