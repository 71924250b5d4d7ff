"""The warm-up, on a CPU, where nothing is launched: its batches, and that workers are asked for all of its kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from compiled_engine.config import EngineConfig, GraphConfig, GraphMode, SchedulerConfig, SpeculationConfig
from compiled_engine.engine import input_batch, step_sampling, warm_up
from compiled_engine.engine.forward import ModelForward
from compiled_engine.engine.input_batch import InputBuffers, launch_prepare
from compiled_engine.engine.load_model import load_model
from compiled_engine.engine.request_states import RequestStates
from compiled_engine.engine.step_graphs import ModelStep
from compiled_engine.engine.step_hooks import StepHooks
from compiled_engine.engine.step_sampling import Advance, StepAdvance, StepSampling, TokenRing, launch_advance
from compiled_engine.engine.warm_up import BatchShape, compile_kernels, not_captured, start_up_batches
from compiled_engine.features.speculation import verification
from compiled_engine.features.speculation.ngram import Ngrams
from compiled_engine.features.speculation.verification import DraftAdvance, launch_verify
from compiled_engine.graphs.cuda_graphs.dispatcher import Dispatcher
from compiled_engine.kernels.compile_ahead import KernelWorkers
from compiled_engine.options import EngineOptions
from compiled_engine.parallel.group import FakeGroup
from compiled_engine.process.profiling import StepClock
from compiled_engine.process.progress import SilentProgress
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.sampler import Sampler

SPECULATIONS = {
    "none": SpeculationConfig(),
    "ngram": SpeculationConfig("ngram", 3, 3, 1),
    "ngram of another length": SpeculationConfig("ngram", 5, 3, 1),
    "adaptive ngram": SpeculationConfig("ngram", 7, 3, 1, adapts=True),
}
OF_DRAFTS = {"ngram_kernel", "verify_kernel"}


class Asked(KernelWorkers):
    """Workers that record the kernels to compile, and compile nothing."""

    def __init__(self) -> None:
        super().__init__(0, None)
        self.kernels: set[tuple[str, str, str]] = set()
        self.closed = True  # nothing is loaded

    def compile(self, module: str, name: str, specialization: str) -> bool:
        self.kernels.add((module, name, specialization))
        return True


@pytest.fixture(scope="module")
def on_cpu() -> EngineConfig:
    options: dict[str, Any] = {"mode": "eager", "dtype": "bfloat16", "attention_backend": "torch", "num_blocks": 64}
    return resolve(EngineOptions(max_model_len=512, max_num_seqs=5, max_num_batched_tokens=96, **options))


def step_of(config: EngineConfig) -> ModelStep:
    """Return the step of a GPU's runner, for a model on a CPU."""
    scheduler, speculation, device = config.scheduler, config.speculation, config.device
    in_each, vocab_size = speculation.num_tokens, config.model.vocab_size
    states = RequestStates(
        config.max_running,
        scheduler.max_model_len,
        config.cache.block_size,
        device,
        2,
        in_each,
        has_history=in_each > 0,
    )
    sampler = Sampler(states.fields, vocab_size)
    model = ModelForward(config, load_model(config, None, FakeGroup(), SilentProgress()), None)
    assert model.work_length(1, 1) > 0
    most_tokens, most_rows = (
        scheduler.max_num_batched_tokens,
        scheduler.max_num_seqs * config.max_new_tokens_per_step + 1,
    )
    buffers = InputBuffers(
        most_tokens,
        most_rows,
        states.block_table_SB.shape[1],
        states.writes,
        device,
        model.work_length(most_tokens, most_rows),
        has_offsets=in_each > 0,
    )
    ring = TokenRing(buffers, device, StepClock(device))
    advance: Advance = StepAdvance(states, buffers)
    if in_each:
        advance = DraftAdvance(config, states, buffers)
    sampling = StepSampling(model, sampler, buffers, ring, advance)
    ngrams = [Ngrams(speculation, states, buffers)] if in_each else []
    return ModelStep(model, buffers, sampling, states, scheduler.max_model_len, StepHooks(ngrams))


@pytest.mark.parametrize("speculation", SPECULATIONS)
def test_the_warm_up_launches_only_what_was_asked_for(
    speculation: str, on_cpu: EngineConfig, hopper: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    config = replace(on_cpu, speculation=SPECULATIONS[speculation], attention_backend="triton")
    on_gpu = replace(config, device=torch.device("cuda", 0))
    monkeypatch.setattr(warm_up, "start_up_batches", lambda config: start_up_batches(on_gpu))
    monkeypatch.setattr(input_batch, "prepare_reference", launch_prepare)
    monkeypatch.setattr(step_sampling, "advance", launch_advance)
    monkeypatch.setattr(verification, "advance", launch_advance)
    monkeypatch.setattr(verification, "verify_reference", launch_verify)
    # What other tests have compiled is there for device 0.
    monkeypatch.setattr(triton.runtime.driver.active, "get_current_device", lambda: 1)
    launched: set[tuple[str, str, str]] = set()

    def note(*, fn: Any, compile: dict[str, Any], **about: Any) -> bool:
        launched.add((fn.module, fn.name, compile["specialization_data"]))
        return True

    step, workers = step_of(config), Asked()
    compile_kernels(config, step, workers, SilentProgress())
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    warm_up.warm_up(config, step, SilentProgress())
    assert launched <= workers.kernels
    assert ({name for _, name, _ in launched} >= OF_DRAFTS) == (config.speculation.num_tokens > 0)


def test_the_warm_up_runs_no_forward_that_was_not_gone_through(
    on_cpu: EngineConfig, hopper: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes the forward of few tokens that ends at hidden states, which short prompts use."""
    config = replace(on_cpu, attention_backend="triton")
    on_gpu = replace(config, device=torch.device("cuda", 0))
    monkeypatch.setattr(warm_up, "start_up_batches", lambda config: start_up_batches(on_gpu))
    monkeypatch.setattr(input_batch, "prepare_reference", launch_prepare)
    monkeypatch.setattr(step_sampling, "advance", launch_advance)
    monkeypatch.setattr(verification, "advance", launch_advance)
    monkeypatch.setattr(verification, "verify_reference", launch_verify)
    runs: list[tuple[int, bool]] = []
    run = ModelForward.run

    def noted(self: ModelForward, num_tokens: int, *arguments: Any, hidden_wanted: bool = False, **more: Any) -> Any:
        runs.append((num_tokens, hidden_wanted))
        return run(self, num_tokens, *arguments, hidden_wanted=hidden_wanted, **more)

    monkeypatch.setattr(ModelForward, "run", noted)
    step = step_of(config)
    compile_kernels(config, step, Asked(), SilentProgress())
    asked = set(runs)
    runs.clear()
    monkeypatch.setattr("triton.knobs.runtime.jit_cache_hook", lambda **about: True)
    warm_up.warm_up(config, step, SilentProgress())
    largest = start_up_batches(on_gpu)[0].num_tokens
    assert {(tokens, wanted) for tokens, wanted in runs if tokens < largest} <= asked
    assert (1, True) in asked


def test_a_batch_without_a_graph_of_its_number_of_drafts_is_warmed_up(on_cpu: EngineConfig) -> None:
    """Four requests of five rows fit into a step, but the largest graph of as many rows has three."""
    graph = GraphConfig(GraphMode.FULL, (1, 3, 8), (), (), ())
    scheduler = SchedulerConfig(8, 20, 128, "fcfs")
    speculation = replace(SPECULATIONS["adaptive ngram"], num_tokens=4)
    config = replace(on_cpu, speculation=speculation, graph=graph, scheduler=scheduler)
    shapes = [BatchShape(5 * count, 5 * count, 128, 5) for count in (1, 2, 3, 4)]
    assert not_captured(config, shapes) == shapes[3:]


@pytest.mark.parametrize("speculation", ["none", "adaptive ngram"])
def test_a_batch_that_is_captured_is_not_warmed_up_twice(
    speculation: str, on_cpu: EngineConfig, hopper: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The captures load what the warm-up leaves out: of decodes, all that tells short contexts and drafts apart."""
    import triton

    short = ((1, 256), (2, 256), (4, 256))
    graph = GraphConfig(GraphMode.FULL, (1, 2, 4, 5), (), short, short)
    speculated = SPECULATIONS[speculation]
    config = replace(on_cpu, speculation=speculated, attention_backend="triton", graph=graph)
    shapes = start_up_batches(replace(config, device=torch.device("cuda", 0)))
    monkeypatch.setattr(warm_up, "start_up_batches", lambda config: shapes)
    monkeypatch.setattr(input_batch, "prepare_reference", launch_prepare)
    monkeypatch.setattr(step_sampling, "advance", launch_advance)
    monkeypatch.setattr(verification, "advance", launch_advance)
    monkeypatch.setattr(verification, "verify_reference", launch_verify)
    monkeypatch.setattr(triton.runtime.driver.active, "get_current_device", lambda: 1)
    launched: set[tuple[str, str]] = set()

    def note(*, fn: Any, compile: dict[str, Any], **about: Any) -> bool:
        launched.add((fn.name, compile["specialization_data"]))
        return True

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    step = step_of(config)
    warm_up.warm_up(replace(config, graph=GraphConfig(GraphMode.NONE)), step, SilentProgress())
    all_batches = set(launched)
    launched.clear()
    warm_up.warm_up(config, step, SilentProgress())
    assert launched <= all_batches
    assert (launched < all_batches) == (speculated.num_tokens > 0)
    for key in Dispatcher(graph, config.scheduler, query_lens=speculated.verified, rare=speculated.rare).keys:
        step.fill(key)
        before = set(launched)
        launched.clear()
        step.warm_up(key)
        searches = "ngram_kernel" in {name for name, _ in launched}
        assert searches == (speculated.num_tokens > 0 and key.max_query_len > 1)
        launched |= before
    assert launched >= all_batches
    left = not_captured(config, shapes)
    assert len(left) == len(shapes) - len(short) - len([shape for shape in shapes if shape.query_len > 1])
    assert not_captured(replace(config, graph=replace(graph, decode_sizes=(1,))), shapes) != left
