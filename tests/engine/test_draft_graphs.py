"""A draft model as a GPU has it: the host knows no drafts, and a graph holds all passes. Here it is recorded work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_first_layers
from graphed_drafts import SAMPLING, Text, config_of, held_out, requests, run, without_drafts
from lagging_device import lagging_device
from recorded_capture import RecordedCapture

from compiled_engine.config import GraphMode
from compiled_engine.engine import runner as model_runner
from compiled_engine.process.progress import SilentProgress
from compiled_engine.processes.start_cores import start_core

pytestmark = pytest.mark.usefixtures("one_thread")
SHOWN = pytest.mark.shown_by(
    "engine/test_draft_graphs.py::test_a_model_that_drafts_for_itself_is_always_right",
    "engine/test_eagle_graphs.py::test_the_tokens_are_those_without_drafts",
)


def of_model(draft: Path, num_drafts: int) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(draft), "num_speculative_tokens": num_drafts}


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "CudaCapture", RecordedCapture)


@pytest.fixture
def text(bundled_model_path: Path) -> Text:
    return held_out(bundled_model_path)


@pytest.fixture
def expected(text: Text) -> dict[str, list[int]]:
    return without_drafts(text)


@pytest.fixture(scope="module")
def first_layers(bundled_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is often right, and often wrong."""
    return write_first_layers(bundled_model_path, tmp_path_factory.mktemp("draft"), 5)


@pytest.mark.parametrize(
    ("mode", "num_drafts", "options"),
    [
        pytest.param(GraphMode.FULL, 3, {"async_scheduling": True}, marks=SHOWN),
        (GraphMode.FULL_DECODE_ONLY, 1, {"async_scheduling": True, "num_blocks": 40}),
        (GraphMode.FULL_AND_PIECEWISE, 5, {}),
        pytest.param(GraphMode.BREAKABLE, 2, {"enable_prefix_caching": False}, marks=SHOWN),
    ],
)
def test_the_tokens_are_those_without_drafts(
    mode: GraphMode,
    num_drafts: int,
    options: dict[str, Any],
    first_layers: Path,
    text: Text,
    expected: dict[str, list[int]],
) -> None:
    core = start_core(config_of(mode, of_model(first_layers, num_drafts), **options), SilentProgress())
    assert run(core, requests(text, SAMPLING)) == expected
    metrics = core.metrics()
    core.close()
    assert 0 < metrics["accepted_tokens"] < metrics["draft_tokens"]
    replays = metrics["graph_replays_by_key"]
    drafted = {name for name in replays if name.startswith(f"draft-{num_drafts} ")}
    assert len(drafted) > 1
    assert sum(replays[name] for name in drafted) <= metrics["steps"]
    assert "num_blocks" not in options or metrics["preemptions"] > 0


def test_a_lagging_device_drafts_for_what_is_there_then(
    first_layers: Path, text: Text, expected: dict[str, list[int]]
) -> None:
    """Two steps are in flight: the host stages the second before the first has run."""
    config = config_of(GraphMode.FULL_DECODE_ONLY, of_model(first_layers, 3), async_scheduling=True)
    core = start_core(config, SilentProgress())
    with lagging_device():
        assert run(core, requests(text, SAMPLING)) == expected
    metrics = core.metrics()
    core.close()
    assert 0 < metrics["accepted_tokens"] < metrics["draft_tokens"]


def test_a_model_that_drafts_for_itself_is_always_right(bundled_model_path: Path, text: Text) -> None:
    """Greedy or by temperature, with chunks of prompts and cached prefixes: a graph knows no filters."""
    config = config_of(GraphMode.FULL, of_model(bundled_model_path, 4), async_scheduling=True)
    core = start_core(config, SilentProgress())
    run(core, requests(text, SAMPLING[:2]))
    metrics = core.metrics()
    core.close()
    assert metrics["accepted_tokens"] == metrics["draft_tokens"] > 50
    assert metrics["prefix_hits"] > 0
