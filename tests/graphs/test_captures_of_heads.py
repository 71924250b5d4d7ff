"""The report lists the graphs of a head, and those of each number of drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from compiled_engine.config import GraphConfig, GraphMode, SchedulerConfig, draft_lengths, json_value
from compiled_engine.graphs.cuda_graphs.dispatcher import Dispatcher
from compiled_engine.graphs.inspection.report import make_report
from compiled_engine.runner.captured_steps import plain_keys
from compiled_engine.runner.eagle_graphs import follow_keys

GRAPH = GraphConfig(GraphMode.FULL, (1, 2, 8), (4, 16), short_decodes=((2, 50), (2, 90)))
SCHEDULER = SchedulerConfig(8, 30, 128, "fcfs")


@pytest.mark.parametrize("adapts", [False, True])
def test_the_captures_of_a_head(adapts: bool) -> None:
    graph = GraphConfig(GraphMode.FULL_DECODE_ONLY, (1, 2, 8), short_decodes=((2, 50),))
    draft = {"graph": json_value(graph), "model": {"head": {}}}
    config: dict[str, Any] = {
        "device": "cuda",
        "graph": json_value(GRAPH),
        "scheduler": json_value(SCHEDULER),
        "speculation": {"num_tokens": 3, "adapts": adapts, "draft": draft},
    }
    captures = make_report(config, None, []).data["captures"]
    names = [f"{capture['kind']} {capture['size']}" for capture in captures]
    lengths = draft_lengths(3)[1:] if adapts else (3,)
    queries = tuple(1 + length for length in lengths)
    keys = Dispatcher(GRAPH, SCHEDULER, queries=4, fewer=queries[:-1]).keys
    keys += tuple(plain_keys(keys).values()) if adapts else ()
    keys += tuple(follow_keys(graph, SCHEDULER, queries).values())
    keys += tuple(replace(key, drafts=length) for length in lengths for key in Dispatcher(graph, SCHEDULER).keys)
    assert sorted(names) == sorted(key.name for key in keys)
    assert len(set(names)) == len(names)


def test_each_number_of_drafts_has_its_graphs() -> None:
    dispatcher = Dispatcher(GRAPH, SCHEDULER, queries=4, fewer=(2, 3))
    names = {}
    for queries in (1, 2, 3, 4, 5):
        key = dispatcher.dispatch(2 * queries, 2, queries, 100)
        names[queries] = None if key is None else key.name
    assert names == {1: "decode 2", 2: "verify-2 4", 3: "verify-3 6", 4: "verify-4 8", 5: "full 16"}
