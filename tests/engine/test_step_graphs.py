"""Graphs of steps on a CPU, where recorded work stands in for CUDA graphs: which are captured, replay and padding."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapter_folders import digest_of, make_adapter
from checkpoints import load_checkpoint
from msgspec import structs
from other_padding import prepare_with, replay_with_other_padding
from plain_config import BASE
from recorded_capture import RecordedCapture
from runner_of import runner_of

from compiled_engine.attention.backend import get_backend
from compiled_engine.config import EngineConfig, GraphConfig, GraphMode
from compiled_engine.engine import runner as model_runner
from compiled_engine.engine import step_graphs
from compiled_engine.engine.core import EngineCore
from compiled_engine.engine.messages import EngineRequest, prefix_root
from compiled_engine.engine.step_graphs import ModelStep, affordable
from compiled_engine.features.adapters.extras import AdapterRef, extras_of
from compiled_engine.features.prompt_logprobs.extras import rows_in
from compiled_engine.graphs.cuda_graphs.dispatcher import GraphKey, decode_key, mixed_key
from compiled_engine.options import EngineOptions
from compiled_engine.process.progress import SilentProgress
from compiled_engine.processes.start_cores import start_core
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams

MODES = [mode for mode in GraphMode if mode not in (GraphMode.NONE, GraphMode.RECORDED)]


def always_and_one(modes: Iterable[GraphMode]) -> list[Any]:
    """Parameters for graphs of whole steps of any kind, and for the other modes, of which one is drawn."""
    drawn = pytest.mark.product(one_in=1000)
    return [mode if mode is GraphMode.FULL else pytest.param(mode, marks=drawn) for mode in modes]


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "CudaCapture", RecordedCapture)


def make_config(
    graph_mode: GraphMode = GraphMode.NONE,
    sizes: tuple[int, ...] = (1, 2, 4),
    token_sizes: tuple[int, ...] = (4, 8, 16),
    short_decodes: tuple[tuple[int, int], ...] = (),
    **options: Any,
) -> EngineConfig:
    chosen: dict[str, Any] = {
        "device": "cpu",
        "mode": "eager",
        "max_num_seqs": 6,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
        "num_blocks": 40,
    }
    config = resolve(EngineOptions(**chosen | options))
    graph = GraphConfig(
        graph_mode,
        sizes if graph_mode.captures_decodes else (),
        token_sizes if graph_mode.captures_mixed else (),
        short_decodes,
    )
    return replace(config, graph=graph)


def make_core(config: EngineConfig) -> EngineCore:
    return start_core(config, SilentProgress())


def run(core: EngineCore, requests: list[EngineRequest]) -> dict[str, tuple[list[int], int]]:
    """Tokens and number of prompt log-probabilities of each request."""
    for request in requests:
        core.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    prompt_entries: Counter[str] = Counter()
    while core.has_unfinished():
        for output in core.step():
            tokens[output.request_id] += output.new_token_ids
            if (found := rows_in(output.extras)) is not None:
                prompt_entries[output.request_id] += len(found[1])
    core.check_integrity()
    return {name: (ids, prompt_entries[name]) for name, ids in tokens.items()}


def make_requests(count: int, shortest: int, **params: Any) -> list[EngineRequest]:
    generator = random.Random(3)
    requests = []
    for i in range(count):
        prompt = tuple(generator.randrange(4096) for _ in range(generator.choice([1, 2, 9, 21, 21])))
        sampling = SamplingParams(
            temperature=generator.choice([0.0, 0.9]),
            seed=i,
            max_tokens=shortest + 2 * i,
            ignore_eos=True,
            **params,
        )
        requests.append(EngineRequest(str(i), prompt, sampling))
    return requests


@pytest.fixture(scope="module")
def plain_tokens() -> dict[str, tuple[list[int], int]]:
    return run(make_core(make_config()), make_requests(14, 1))


@pytest.mark.parametrize("mode", MODES)
def test_replayed_batches_give_the_tokens_of_plain_ones(
    mode: GraphMode, plain_tokens: dict[str, tuple[list[int], int]]
) -> None:
    core = make_core(make_config(mode))
    assert core.metrics()["captures"] == len(runner_of(core).step_graphs.dispatcher.keys)
    assert run(core, make_requests(14, 1)) == plain_tokens
    metrics = core.metrics()
    replays = metrics["graph_replays_by_key"]
    kinds = {name.split()[0] for name in replays}
    assert kinds == {key.name.split()[0] for key in runner_of(core).step_graphs.dispatcher.keys}
    assert metrics["graph_replays"] == sum(replays.values())
    assert metrics["graph_replays"] + metrics["graph_fallbacks"] == metrics["steps"]
    assert metrics["graph_padded_tokens"] > 0
    histogram = metrics["batch_histogram"]
    assert sum(sum(counts.values()) for counts in histogram.values()) == metrics["steps"]


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.BREAKABLE])
def test_replayed_batches_of_eager_code_have_their_adapters(
    mode: GraphMode, plain_tokens: dict[str, tuple[list[int], int]], tmp_path: Path
) -> None:
    plain = make_config(enable_lora=True, max_loras=2, max_lora_rank=4)
    model = load_checkpoint(plain.model.path, torch.float32)
    folders = [make_adapter(tmp_path / str(seed), model, 4, seed=seed) for seed in range(2)]
    adapters = [None, *(AdapterRef(digest_of(folder), str(folder), folder.name) for folder in folders)]

    def requests() -> list[EngineRequest]:
        """The first and every third without an adapter."""
        found = []
        for i, request in enumerate(make_requests(14, 1)):
            adapter = adapters[i % 3]
            root = prefix_root(adapter=adapter and adapter.digest)
            found.append(structs.replace(request, extras=extras_of(adapter), prefix_root=root))
        return found

    expected = run(make_core(plain), requests())
    assert [expected[str(i)] == plain_tokens[str(i)] for i in range(3, 6)] == [True, False, False]
    graphed = make_core(replace(make_config(mode), adapters=plain.adapters))
    assert run(graphed, requests()) == expected
    assert any("adapted 1" in name for name in graphed.metrics()["graph_replays_by_key"])


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.FULL_AND_PIECEWISE])
def test_compiled_pieces_are_chosen_and_padded_alike(
    mode: GraphMode, plain_tokens: dict[str, tuple[list[int], int]]
) -> None:
    config = make_config(mode, mode="compiled", compile_ranges=(4,))
    assert run(make_core(config), make_requests(14, 1)) == plain_tokens


@pytest.mark.parametrize("mode", always_and_one(MODES))
def test_what_stands_in_unused_slots_changes_nothing(
    mode: GraphMode, plain_tokens: dict[str, tuple[list[int], int]]
) -> None:
    core = make_core(make_config(mode))
    with torch.inference_mode():
        for cache in runner_of(core).model.kv_caches:
            cache.fill_(float("nan"))
    assert run(core, make_requests(14, 1)) == plain_tokens


@pytest.mark.parametrize("mode", always_and_one(mode for mode in MODES if mode.captures_mixed))
def test_padding_rows_change_no_bit(
    mode: GraphMode, plain_tokens: dict[str, tuple[list[int], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A padded batch is replayed again with other padding."""
    padding_1 = torch.zeros(1, dtype=torch.int64)
    monkeypatch.setattr(step_graphs, "prepare", prepare_with(padding_1))
    core = make_core(make_config(mode))
    checked = replay_with_other_padding(runner_of(core), padding_1, monkeypatch)
    assert run(core, make_requests(14, 1)) == plain_tokens
    assert checked.total() > 3


@pytest.mark.parametrize("mode", [GraphMode.NONE, GraphMode.FULL, GraphMode.BREAKABLE])
def test_attention_is_planned_once_a_step(mode: GraphMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a layer, by a backend that has a plan."""
    counts: Counter[str] = Counter()
    config = make_config(mode)
    backend = type(get_backend(config.attention_backend))
    monkeypatch.setattr(backend, "work_length", lambda *arguments: 1)
    core = make_core(config)

    def counted(name: str) -> Callable[..., None]:
        function = getattr(backend, name)

        def count(*arguments: Any) -> None:
            counts[name] += 1
            function(*arguments)

        return count

    for name in ("plan", "attend"):
        monkeypatch.setattr(backend, name, counted(name))
    run(core, make_requests(5, 1))
    steps = core.metrics()["steps"]
    assert counts == {"plan": steps, "attend": steps * core.config.model.num_layers}


def test_prompt_logprobs_are_complete_though_chunks_of_one_token_could_be_replayed() -> None:
    core = make_core(make_config(GraphMode.FULL_DECODE_ONLY, sizes=(6,), max_num_batched_tokens=6))
    requests = make_requests(8, 25, prompt_logprobs=0)
    for (_, entries), request in zip(run(core, requests).values(), requests, strict=True):
        assert entries == len(request.prompt_token_ids) - 1
    metrics = core.metrics()
    assert metrics["graph_replays"] > 0
    assert metrics["graph_fallbacks_by_reason"]["prompt log-probabilities need the hidden states"] > 0


def test_fallbacks_have_reasons_and_an_unexpected_one_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(make_config(GraphMode.FULL_AND_PIECEWISE, token_sizes=(2,)))
    with caplog.at_level(logging.WARNING, "compiled_engine"):
        run(core, make_requests(14, 4))
    reasons = core.metrics()["graph_fallbacks_by_reason"]
    # Of up to six decodes at most four have a graph.
    assert reasons["more decodes than every captured size"] > 1
    assert reasons["larger than every captured size"] > 1
    warnings = [record for record in caplog.records if "without a CUDA graph" in record.getMessage()]
    assert len(warnings) == 1


def test_a_replaced_buffer_is_found_out_in_debug_runs() -> None:
    core = make_core(make_config(GraphMode.FULL))
    buffers = runner_of(core).buffers
    buffers.input_ids_T = buffers.input_ids_T.clone()
    with pytest.raises(AssertionError, match="a buffer that the graph reads was replaced"):
        run(core, make_requests(1, 1))


def test_closing_resets_every_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[RecordedCapture] = []

    def make_capture(device: torch.device) -> RecordedCapture:
        captures.append(RecordedCapture(device))
        return captures[-1]

    monkeypatch.setattr(model_runner, "CudaCapture", make_capture)
    make_core(make_config(GraphMode.FULL_AND_PIECEWISE)).close()
    assert [capture.num_reset for capture in captures] == [6]


def test_graphs_are_captured_as_far_as_their_pool_is_small() -> None:
    """A step of 256 tokens takes 256 units; a pool may have an eighth of what is left without it."""
    config = replace(BASE, graph=GraphConfig(GraphMode.FULL, (1, 2), (8, 16, 32, 64)))

    def sizes(left: int | None, all_reduce_min: Callable[[int], int] = lambda count: count) -> tuple[int, ...]:
        return affordable(config, 256, left, all_reduce_min)

    assert sizes(None) == (8, 16, 32, 64)
    assert [sizes(256 + 8 * size) for size in (64, 63, 32, 8, 7)] == [
        (8, 16, 32, 64), (8, 16, 32), (8, 16, 32), (8,), ()
    ]  # fmt: skip
    assert sizes(256 + 8 * 64, lambda count: count - 1) == (8, 16, 32)


def test_graphs_that_are_left_out_are_named(caplog: pytest.LogCaptureFixture) -> None:
    config = replace(BASE, graph=GraphConfig(GraphMode.FULL, (), (8, 16)))
    affordable(config, 256, 256 + 8 * 16, lambda count: count)
    assert not caplog.records
    affordable(config, 256, 256 + 8 * 8, lambda count: count)
    assert "no CUDA graphs of more than 8 tokens: their pool would take more than 12 % of" in caplog.text


def step_of_slots(slots_T: torch.Tensor) -> ModelStep:
    buffers = SimpleNamespace(logits_inputs=lambda variant, num_tokens: (slots_T[:num_tokens],))
    model = SimpleNamespace(ends_at_logits=lambda num_tokens, variant: num_tokens <= 4)
    given: Any = (model, buffers, None, None)
    return ModelStep(*given, 64)


@pytest.mark.parametrize(
    ("key", "is_logits"),
    [(decode_key(5, 64), True), (mixed_key(4, 2, 64), True), (mixed_key(5, 2, 64), False)],
    ids=["decodes", "few tokens", "many tokens"],
)
def test_what_a_graph_leaves_has_the_slots_of_its_batch(key: GraphKey, is_logits: bool) -> None:
    """Its buffers have slots of more tokens than the graph."""
    slots_T = torch.arange(14, dtype=torch.int32)
    left_TD, step = torch.zeros(key.num_tokens, 2), step_of_slots(slots_T)
    plain = step.output(key, left_TD)
    assert (plain.is_logits, plain.logits_inputs) == (is_logits, ())
    adapted = step.output(key._replace(extra=(("adapted", 1),)), left_TD, "adapted")
    assert (adapted.is_logits, [each.tolist() for each in adapted.logits_inputs]) == (
        is_logits,
        [slots_T[: key.num_tokens].tolist()],
    )
