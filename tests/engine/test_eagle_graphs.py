"""An EAGLE-3 head as a GPU has it: the host knows no drafts, and graphs hold its passes: here recorded work."""

from __future__ import annotations

from dataclasses import replace
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
from graphed_drafts import SAMPLING, Text, config_of, held_out, requests, run, without_drafts
from lagging_device import lagging_device
from msgspec import structs
from recorded_capture import RecordedCapture
from scripted_drafts import AnyLength, AtRest

from compiled_engine.config import GraphMode
from compiled_engine.engine import runner as model_runner
from compiled_engine.engine.input_batch import InputBatch
from compiled_engine.engine.messages import EngineRequest
from compiled_engine.features import registry
from compiled_engine.features.speculation.draft_head import DraftHead
from compiled_engine.process.progress import SilentProgress
from compiled_engine.processes.start_cores import start_core

VOCAB = 131
SHOWN = pytest.mark.shown_by(
    "engine/test_draft_graphs.py::test_the_tokens_are_those_without_drafts",
    "engine/test_eagle_graphs.py::test_a_lagging_device_drafts_for_what_is_there_then",
)
pytestmark = pytest.mark.usefixtures("one_thread")


def of_head(
    head: Path, num_drafts: int, *, adapts: bool = False, draft_sharpness: float | str = "auto"
) -> dict[str, Any]:
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": num_drafts}
    return drafts | {"enable_adaptive_verification": adapts, "draft_sharpness": draft_sharpness}


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
def fitted(bundled_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that is often right, and often wrong."""
    token_ids = torch.tensor([held_out(bundled_model_path)(100 * i, 100) for i in range(8)])
    return write_fitted_head(tmp_path_factory.mktemp("head"), bundled_model_path, token_ids)


@pytest.mark.parametrize(
    ("mode", "num_drafts", "adapts", "options"),
    [
        pytest.param(GraphMode.FULL, 3, False, {"async_scheduling": True}, marks=SHOWN),
        pytest.param(GraphMode.FULL_DECODE_ONLY, 1, False, {"async_scheduling": True, "num_blocks": 40}, marks=SHOWN),
        (GraphMode.FULL_AND_PIECEWISE, 5, True, {}),
        (GraphMode.FULL, 3, True, {"async_scheduling": True, "num_blocks": 26}),
        (GraphMode.BREAKABLE, 2, False, {"enable_prefix_caching": False}),
    ],
)
def test_the_tokens_are_those_without_drafts(
    mode: GraphMode,
    num_drafts: int,
    adapts: bool,
    options: dict[str, Any],
    fitted: Path,
    text: Text,
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the number of drafts changes, requests stop drafting, and some step has requests with and without drafts."""
    monkeypatch.setattr(registry, "DraftLength", AnyLength)
    core = start_core(config_of(mode, of_head(fitted, num_drafts, adapts=adapts), **options), SilentProgress())
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
    assert ("plain-decode" in {name.split()[0] for name in replays}) == adapts
    if num_drafts == 5:
        assert {name.split()[0] for name in replays} >= {"draft-5", "verify-6", "follow-decode", "follow-verify-6"}
        assert len({name.split()[0] for name in replays if name.startswith("draft-")}) > 1
        assert metrics["rested"] > 0
    assert "num_blocks" not in options or metrics["preemptions"] > 0


@pytest.mark.parametrize(
    ("mode", "adapts", "num_captures"),
    [(GraphMode.FULL, False, 17), (GraphMode.FULL, True, 29), (GraphMode.PIECEWISE, True, 8)],
)
def test_a_graph_is_captured_for_what_may_be_replayed(
    mode: GraphMode, adapts: bool, num_captures: int, fitted: Path
) -> None:
    """There are three decode sizes and two sizes of other batches, with one and three drafts if the number changes.

    The head is prefilled by a graph after each step that has a graph.
    """
    core = start_core(config_of(mode, of_head(fitted, 3, adapts=adapts)), SilentProgress())
    assert core.metrics()["captures"] == num_captures
    core.close()


@pytest.mark.parametrize("adapts", [False, True])
def test_a_lagging_device_drafts_for_what_is_there_then(
    adapts: bool, fitted: Path, text: Text, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps are in flight: the host stages the second before the first has run."""
    monkeypatch.setattr(registry, "DraftLength", AnyLength)
    drafts = of_head(fitted, 3, adapts=adapts)
    core = start_core(config_of(GraphMode.FULL, drafts, async_scheduling=True), SilentProgress())
    with lagging_device():
        assert run(core, requests(text, SAMPLING)) == expected
    metrics = core.metrics()
    core.close()
    assert 0 < metrics["accepted_tokens"] < metrics["draft_tokens"]


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.FULL_AND_PIECEWISE])
def test_steps_at_which_the_head_rests_are_those_without_a_head(
    mode: GraphMode, fitted: Path, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launch by launch, from the first prompt on."""
    monkeypatch.setattr(registry, "DraftLength", AtRest)
    found = []
    for drafts in (of_head(fitted, 3, adapts=True), None):
        core = start_core(config_of(mode, drafts, async_scheduling=True), SilentProgress())
        tokens = run(core, requests(text, SAMPLING[:4]))
        metrics = core.metrics()
        core.close()
        found.append((tokens, metrics["steps"], metrics["graph_replays_by_key"], metrics["graph_fallbacks"]))
    (tokens, steps, replays, fallbacks), (plain_tokens, plain_steps, plain_replays, plain_fallbacks) = found
    assert tokens == plain_tokens
    assert (steps, fallbacks) == (plain_steps, plain_fallbacks)
    assert {name.removeprefix("plain-"): count for name, count in replays.items()} == plain_replays
    assert any(name.startswith("plain-decode ") for name in replays)


def tiny(folder: Path) -> Path:
    folder.mkdir()
    make_checkpoint(folder, "qwen3", hidden_size=64, vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=2)
    return folder


def few(sampling: tuple[dict[str, Any], ...]) -> list[EngineRequest]:
    """With chunks of prompts, and prompts that begin alike."""

    def ids(start: int, count: int) -> tuple[int, ...]:
        return tuple((7 * start + 3 * j * j) % VOCAB for j in range(count))

    return [
        structs.replace(each, sampling_params=replace(each.sampling_params, ignore_eos=True))
        for each in requests(ids, sampling)
    ]


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.PIECEWISE])
def test_an_exact_head_is_always_right(mode: GraphMode, tmp_path: Path) -> None:
    """Greedy or by temperature; its logits are half of the model's, and a sharpness of 2 makes up for it."""
    target = tiny(tmp_path / "target")
    make_bigram_model(target)
    head = write_exact_head(tmp_path / "head", target, factor=0.5)
    model = {"model": str(target), "skip_tokenizer_init": True}
    config = config_of(mode, of_head(head, 4, draft_sharpness=2), async_scheduling=True, **model)
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
    receive = DraftHead.receive

    def record(self: DraftHead, batch: InputBatch, hidden_wanted: bool) -> None:
        drafting, states = self._drafting, self._states
        assert drafting is not None
        known = {}
        for row in drafting.rows.tolist():
            computed = int(states.num_computed_S[row])
            known[row] = tuple(states.all_token_ids(row)[: computed + 1].tolist())
        receive(self, batch, hidden_wanted)
        assert states.ahead_SK is not None
        for place, row in enumerate(drafting.rows.tolist()):
            room = sum(count > place for count in drafting.num_drafting)
            drafts = states.ahead_SK[row, :room].tolist()
            assert seen.setdefault(known[row], drafts)[:room] == drafts[: len(seen[known[row]])]

    monkeypatch.setattr(DraftHead, "receive", record)
    options = {"model": str(target), "skip_tokenizer_init": True, "num_blocks": 28}
    core = start_core(config_of(GraphMode.FULL_AND_PIECEWISE, of_head(head, 3), **options), SilentProgress())
    run(core, few(({"temperature": 0.0},)))
    metrics = core.metrics()
    core.close()
    assert metrics["preemptions"] > 0
    reference = Reference(target, config, tensors)
    assert len(seen) > 30
    for known, drafts in list(seen.items())[::2]:
        assert reference.drafts(list(known), len(drafts)) == drafts
