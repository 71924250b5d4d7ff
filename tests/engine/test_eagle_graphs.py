"""An EAGLE-3 head as a GPU has it: the host knows no drafts, and graphs hold its passes: here recorded work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from eagle_heads import (
    Reference,
    head_config,
    make_bigram_model,
    random_tensors,
    write_exact_head,
    write_fitted_head,
    write_head,
)
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
from compiled_engine.runner.model_runner import Runner
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
SIZES, VOCAB = (1, 2, 4), 131
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


def config_of(mode: GraphMode, head: Path, num_drafts: int, *, adapts: bool = False, **options: Any) -> EngineConfig:
    """With graphs of up to four requests; more are served without."""
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": num_drafts}
    drafts |= {"enable_adaptive_verification": adapts, "draft_sharpness": options.pop("draft_sharpness", "auto")}
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
def fitted(bundled_model_path: Path, text: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that is often right, and often wrong."""
    token_ids = torch.tensor([text(100 * i, 100) for i in range(8)])
    return write_fitted_head(tmp_path_factory.mktemp("head"), bundled_model_path, token_ids)


@pytest.mark.parametrize(
    ("mode", "num_drafts", "options"),
    [
        (GraphMode.FULL, 3, {"async_scheduling": True}),
        (GraphMode.FULL_DECODE_ONLY, 1, {"async_scheduling": True, "num_blocks": 40}),
        (GraphMode.FULL_AND_PIECEWISE, 5, {"adapts": True}),
        (GraphMode.BREAKABLE, 2, {"enable_prefix_caching": False}),
    ],
)
def test_the_tokens_are_those_without_drafts(
    mode: GraphMode,
    num_drafts: int,
    options: dict[str, Any],
    fitted: Path,
    text: Callable[[int, int], tuple[int, ...]],
    expected: dict[str, list[int]],
) -> None:
    core = start_core(config_of(mode, fitted, num_drafts, **options), SilentProgress())
    assert run(core, requests(text, SAMPLING)) == expected
    metrics = core.metrics()
    core.close()
    assert 0 < metrics["accepted_tokens"] < metrics["draft_tokens"]
    replays = metrics["graph_replays_by_key"]
    assert any(name.startswith("draft-") for name in replays)
    verified = sum(count for name, count in replays.items() if name.startswith(("verify-", "decode ")))
    followed = sum(count for name, count in replays.items() if name.startswith("follow-"))
    assert followed == verified
    assert (followed > 0) == mode.captures_decodes
    if "adapts" in options:
        assert {name.split()[0] for name in replays} >= {"draft-5", "verify-6", "follow-decode", "follow-verify-6"}
        assert len({name.split()[0] for name in replays if name.startswith("draft-")}) > 1
    assert "num_blocks" not in options or metrics["preemptions"] > 0


def test_a_lagging_device_drafts_for_what_is_there_then(
    fitted: Path, text: Callable[[int, int], tuple[int, ...]], expected: dict[str, list[int]]
) -> None:
    """Two steps are in flight: the host stages the second before the first has run."""
    core = start_core(config_of(GraphMode.FULL, fitted, 3, async_scheduling=True), SilentProgress())
    with lagging_device():
        assert run(core, requests(text, SAMPLING)) == expected
    metrics = core.metrics()
    core.close()
    assert 0 < metrics["accepted_tokens"] < metrics["draft_tokens"]


def tiny(folder: Path) -> Path:
    folder.mkdir()
    make_checkpoint(folder, "qwen3", hidden_size=64, vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=2)
    return folder


def few(sampling: tuple[dict[str, Any], ...]) -> list[EngineRequest]:
    """With chunks of prompts, and prompts that begin alike."""

    def ids(start: int, count: int) -> tuple[int, ...]:
        return tuple((7 * start + 3 * j * j) % VOCAB for j in range(count))

    return [
        replace(each, sampling_params=replace(each.sampling_params, ignore_eos=True))
        for each in requests(ids, sampling)
    ]


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.PIECEWISE])
def test_an_exact_head_is_always_right(mode: GraphMode, tmp_path: Path) -> None:
    """Greedy or by temperature; its logits are half of the model's, and a sharpness of 2 makes up for it."""
    target = tiny(tmp_path / "target")
    make_bigram_model(target)
    head = write_exact_head(tmp_path / "head", target, factor=0.5)
    model = {"model": str(target), "skip_tokenizer_init": True}
    config = config_of(mode, head, 4, async_scheduling=True, draft_sharpness=2, **model)
    core = start_core(config, SilentProgress())
    run(core, few(SAMPLING[:2]))
    metrics = core.metrics()
    core.close()
    assert metrics["accepted_tokens"] == metrics["draft_tokens"] > 50
    assert metrics["prefix_hits"] > 0


@pytest.mark.parametrize("draft_vocab_size", [50, VOCAB])
def test_drafts_are_those_of_the_whole_sequence(
    draft_vocab_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With chunks of prompts, cached prefixes, preempted requests, and drafts that were right before."""
    target = tiny(tmp_path / "target")
    config = head_config(target, draft_vocab_size=draft_vocab_size)
    tensors = random_tensors(config)
    head = write_head(tmp_path / "head", config, tensors)
    seen: dict[tuple[int, ...], list[int]] = {}
    run_step = Runner.run

    def record(self: Runner, batch: Any, hidden_wanted: bool, **more: Any) -> Any:
        drafting = more["drafting"]
        states = self.states
        known = {}
        for row in drafting.rows.tolist():
            computed = int(states.num_computed_S[row])
            known[row] = tuple(states.known_ids(row)[: computed + 1].tolist())
        pending = run_step(self, batch, hidden_wanted, **more)
        assert states.drafts_SK is not None
        for place, row in enumerate(drafting.rows.tolist()):
            room = sum(count > place for count in drafting.num_drafting)
            drafts = states.drafts_SK[row, :room].tolist()
            assert seen.setdefault(known[row], drafts)[:room] == drafts[: len(seen[known[row]])]
        return pending

    monkeypatch.setattr(Runner, "run", record)
    options = {"model": str(target), "skip_tokenizer_init": True, "num_blocks": 28}
    core = start_core(config_of(GraphMode.FULL_AND_PIECEWISE, head, 3, **options), SilentProgress())
    run(core, few(({"temperature": 0.0},)))
    metrics = core.metrics()
    core.close()
    assert metrics["preemptions"] > 0
    reference = Reference(target, config, tensors)
    assert len(seen) > 30
    for known, drafts in list(seen.items())[::2]:
        assert reference.drafts(list(known), len(drafts)) == drafts
