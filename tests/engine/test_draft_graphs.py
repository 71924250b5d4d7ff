"""A draft model as a GPU has it: the host knows no drafts, and a graph holds all passes. Here it is recorded work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_first_layers
from lagging_device import lagging_device
from recorded_capture import RecordedCapture

from compiled_engine.config import EngineConfig, GraphConfig, GraphMode
from compiled_engine.core.engine_core import EngineCore
from compiled_engine.messages import EngineRequest
from compiled_engine.options import EngineOptions
from compiled_engine.process.progress import SilentProgress
from compiled_engine.processes.start_cores import start_core
from compiled_engine.resolve.engine import resolve
from compiled_engine.runner import model_runner
from compiled_engine.sampling.params import SamplingParams

# Few tokens a step, so that prompts come in chunks.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "mode": "eager",
    "max_model_len": 96,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 40,
    "block_size": 4,
    "num_blocks": 200,
}
SIZES = (1, 2, 4)
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 30},
    {"temperature": 0.0, "repetition_penalty": 1.1},
    {"temperature": 0.0, "disable_spec_decode": True},
)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "CudaCapture", RecordedCapture)


def config_of(mode: GraphMode, draft: Path, num_drafts: int, **options: Any) -> EngineConfig:
    """With graphs of up to four requests; more are served without."""
    drafts = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": num_drafts}
    config = resolve(EngineOptions(**OPTIONS | {"speculative_config": drafts} | options))
    decodes = SIZES if mode.captures_decodes else ()
    own = GraphConfig(mode, decodes, (8, 16) if mode.captures_mixed else ())
    speculation = config.speculation
    assert speculation.draft is not None
    speculation = replace(speculation, draft=replace(speculation.draft, graph=GraphConfig(mode, SIZES)))
    return replace(config, graph=own, speculation=speculation)


def requests(text: Callable[[int, int], tuple[int, ...]], sampling: tuple[dict[str, Any], ...]) -> list[EngineRequest]:
    """Some share a prefix, and some are longer than a step."""
    return [
        EngineRequest(
            str(number),
            text((0, 300)[number % 2] if number % 3 else 50 * number, (1, 7, 20, 50)[number % 4]),
            SamplingParams(
                seed=number, max_tokens=2 + 3 * number, ignore_eos=number % 2 == 0, **sampling[number % len(sampling)]
            ),
        )
        for number in range(10)
    ]


@pytest.fixture(scope="module")
def text(bundled_model_path: Path) -> Callable[[int, int], tuple[int, ...]]:
    from compiled_engine.frontend.tokenizer import load_tokenizer

    ids = load_tokenizer(bundled_model_path).encode((bundled_model_path / "held_out.txt").read_text()[:4000])
    return cache(lambda start, count: tuple(ids[start : start + count]))


def run(core: EngineCore, asked: list[EngineRequest]) -> dict[str, list[int]]:
    for request in asked:
        core.add(request)
    found: dict[str, list[int]] = {request.request_id: [] for request in asked}
    while core.has_unfinished():
        for output in core.step():
            found[output.request_id] += output.new_token_ids
    core.check_integrity()
    return found


@pytest.fixture(scope="module")
def expected(text: Callable[[int, int], tuple[int, ...]]) -> dict[str, list[int]]:
    core = start_core(resolve(EngineOptions(**OPTIONS)), SilentProgress())
    found = run(core, requests(text, SAMPLING))
    core.close()
    return found


@pytest.fixture(scope="module")
def first_layers(bundled_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is often right, and often wrong."""
    return write_first_layers(bundled_model_path, tmp_path_factory.mktemp("draft"), 5)


@pytest.mark.parametrize(
    ("mode", "num_drafts", "options"),
    [
        (GraphMode.FULL, 3, {"async_scheduling": True}),
        (GraphMode.FULL_DECODE_ONLY, 1, {"async_scheduling": True, "num_blocks": 40}),
        (GraphMode.FULL_AND_PIECEWISE, 5, {}),
        (GraphMode.BREAKABLE, 2, {"enable_prefix_caching": False}),
    ],
)
def test_the_tokens_are_those_without_drafts(
    mode: GraphMode,
    num_drafts: int,
    options: dict[str, Any],
    first_layers: Path,
    text: Callable[[int, int], tuple[int, ...]],
    expected: dict[str, list[int]],
) -> None:
    core = start_core(config_of(mode, first_layers, num_drafts, **options), SilentProgress())
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
    first_layers: Path, text: Callable[[int, int], tuple[int, ...]], expected: dict[str, list[int]]
) -> None:
    """Two steps are in flight: the host stages the second before the first has run."""
    config = config_of(GraphMode.FULL_DECODE_ONLY, first_layers, 3, async_scheduling=True)
    core = start_core(config, SilentProgress())
    with lagging_device():
        assert run(core, requests(text, SAMPLING)) == expected
    metrics = core.metrics()
    core.close()
    assert 0 < metrics["accepted_tokens"] < metrics["draft_tokens"]


def test_a_model_that_drafts_for_itself_is_always_right(
    bundled_model_path: Path, text: Callable[[int, int], tuple[int, ...]]
) -> None:
    """Greedy or by temperature, with chunks of prompts and cached prefixes: a graph knows no filters."""
    config = config_of(GraphMode.FULL, bundled_model_path, 4, async_scheduling=True)
    core = start_core(config, SilentProgress())
    run(core, requests(text, SAMPLING[:2]))
    metrics = core.metrics()
    core.close()
    assert metrics["accepted_tokens"] == metrics["draft_tokens"] > 50
    assert metrics["prefix_hits"] > 0
