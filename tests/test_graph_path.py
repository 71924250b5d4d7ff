"""A decode batch through dispatch, padding and replay, on a CPU: a recorder stands in for the captured graphs."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from compiled_engine.config import EngineConfig, GraphMode
from compiled_engine.engine_core import EngineCore
from compiled_engine.engine_io import EngineRequest
from compiled_engine.executor import InProcessExecutor
from compiled_engine.graphs.compiler import Forwards
from compiled_engine.graphs.dispatcher import Dispatcher, GraphKey
from compiled_engine.options import EngineOptions
from compiled_engine.progress import SilentProgress
from compiled_engine.resolve import resolve
from compiled_engine.runner.model_runner import Runner
from compiled_engine.sampling.params import SamplingParams


class RecordedGraphs:
    """Runs what a graph would have captured, on the whole padded batch, and counts it."""

    def __init__(self, runner: Runner):
        self.replays: Counter[int] = Counter()
        self._runner = runner
        self.num_captures = 0
        self.bytes_used = 0
        self.capture_bytes: dict[int, int] = {}

    def replay(self, key: GraphKey) -> torch.Tensor:
        self.replays[key.num_requests] += 1
        return self._runner._decode_step(key)

    def close(self) -> None:
        pass


def make_core(config: EngineConfig) -> tuple[EngineCore, Runner]:
    core = EngineCore(config, SilentProgress())
    executor = core._executor
    assert isinstance(executor, InProcessExecutor)
    return core, executor._runner


def with_graphs(config: EngineConfig, *sizes: int) -> tuple[EngineCore, RecordedGraphs]:
    core, runner = make_core(config)
    runner.dispatcher = Dispatcher(GraphMode.FULL_DECODE_ONLY, sizes, config.scheduler.max_model_len)
    graphs: Any = RecordedGraphs(runner)
    runner.graphs = graphs
    return core, graphs


def run(core: EngineCore, requests: list[EngineRequest]) -> dict[str, tuple[list[int], int]]:
    """Tokens and number of prompt log-probabilities of each request."""
    for request in requests:
        core.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    prompt_entries: Counter[str] = Counter()
    while core.has_unfinished():
        for output in core.step():
            tokens[output.request_id] += output.new_token_ids
            if output.prompt_logprobs is not None:
                prompt_entries[output.request_id] += len(output.prompt_logprobs[1])
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


def make_config(max_num_batched_tokens: int) -> EngineConfig:
    return resolve(
        EngineOptions(
            device="cpu",
            mode="eager",
            max_num_seqs=6,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=64,
            num_blocks=40,
        )
    )


def test_replayed_batches_give_the_tokens_of_plain_ones() -> None:
    config = make_config(32)
    plain, _ = make_core(config)
    graphed, graphs = with_graphs(config, 1, 2, 4)
    requests = make_requests(14, 1)
    assert run(graphed, requests) == run(plain, requests)
    assert set(graphs.replays) == {1, 2, 4}
    metrics = graphed.metrics()
    assert metrics["graph_replays"] == sum(graphs.replays.values())
    # Batches of five or six decodes are larger than every graph: they run without one, and are counted.
    assert metrics["graph_fallbacks"] > 0


def test_prompt_logprobs_are_complete_though_chunks_of_one_token_could_be_replayed() -> None:
    core, graphs = with_graphs(make_config(6), 6)
    requests = make_requests(8, 25, prompt_logprobs=0)
    for (_, entries), request in zip(run(core, requests).values(), requests, strict=True):
        assert entries == len(request.prompt_token_ids) - 1
    assert graphs.replays


def test_a_step_that_fails_anywhere_leaves_the_core_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    core, runner = make_core(make_config(32))
    expected = run(core, make_requests(3, 1))

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("injected")

    for owner, name, broken_one in (
        (runner.sampler, "add_row", fail),
        (runner.states, "remove", fail),
        (runner, "forwards", Forwards(fail)),
        (runner.sampler, "sample", fail),
        (core._scheduler, "_advance", fail),
    ):
        for request in make_requests(2, 6):
            core.add(request)
        core.step()
        for request in make_requests(3, 1)[2:]:
            core.add(request)
        with monkeypatch.context() as broken:
            broken.setattr(owner, name, broken_one)
            try:
                for _ in range(20):
                    core.step()
            except MemoryError:
                pass
        for request_id in ("0", "1", "2"):
            core.abort(request_id)
        assert run(core, make_requests(3, 1)) == expected, name
        assert core.metrics()["blocks_free"] == core.metrics()["blocks_total"]
        assert len(runner.states._row_of) <= 3
