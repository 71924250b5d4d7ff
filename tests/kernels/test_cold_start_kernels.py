"""Kernels of a cold start are compiled in parallel, here on a CPU: every part runs, and leaves nothing behind."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_of import runner_of

from compiled_engine.attention.backends.torch_backend import BACKEND as TORCH
from compiled_engine.attention.inputs import attention_inputs_of
from compiled_engine.engine import warm_up
from compiled_engine.engine.input_batch import empty_batch, prepare, stage_empty, step_of_batch
from compiled_engine.engine.warm_up import BatchShape, compile_kernels, compile_kernels_ahead, start_up_batches
from compiled_engine.kernels.cache_folder import VARIABLE
from compiled_engine.kernels.compile_ahead import KernelWorkers
from compiled_engine.llm import LLM
from compiled_engine.options import EngineOptions
from compiled_engine.parallel.group import FakeGroup
from compiled_engine.process.progress import SilentProgress
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": list(range(40))}]


pytestmark = pytest.mark.usefixtures("hopper")


@pytest.fixture(autouse=True)
def _threads_of_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 1, "max_num_batched_tokens": 1}, {"max_num_seqs": 9}])
def test_it_leaves_no_trace(options: dict[str, int]) -> None:
    with LLM(mode="eager", dtype="float32", progress=False, num_blocks=20, **options) as llm:
        before = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
        runner = runner_of(llm)
        compile_kernels(llm.config, runner.step, KernelWorkers(0, None), SilentProgress())
        runner.ring.lose_count()  # what ran were steps
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)] == before


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 1, "max_num_batched_tokens": 1}])
def test_ahead_of_the_trace_it_needs_no_model(options: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[object] = []
    monkeypatch.setattr(warm_up, "ways_of_sampling", lambda *arguments: [lambda: ways.append(arguments)])
    attended: list[torch.Size] = []
    attend = TORCH.attend

    def counted(q_THd: torch.Tensor, *arguments: Any) -> None:
        attended.append(q_THd.shape)
        attend(q_THd, *arguments)

    with LLM(mode="eager", attention_backend="torch", progress=False, num_blocks=20, **options) as llm:
        monkeypatch.setattr(TORCH, "attend", counted)
        compile_kernels_ahead(llm.config, FakeGroup(), KernelWorkers(0, None))
        heads = llm.config.model.heads_of(0)
    assert len(ways) == 1
    tokens = [shape.num_tokens for shape in start_up_batches(llm.config)]
    assert attended == [torch.Size((count, heads.num_heads, heads.head_dim)) for count in tokens]


def test_its_kernels_stay_apart_from_a_piece_that_another_thread_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile Triton's folder is the piece's."""
    from triton.runtime.cache import get_cache_manager

    kept: list[Path] = []

    def keep() -> None:
        kept.append(Path(get_cache_manager("00" * 32).put(b"a", "launcher.so")))

    monkeypatch.setenv(VARIABLE, str(tmp_path / "entry" / "triton"))
    monkeypatch.setattr(warm_up, "start_up_batches", lambda config: [])
    monkeypatch.setattr(warm_up, "ways_of_sampling", lambda *arguments: [keep])
    config = resolve(EngineOptions(device="cpu", mode="eager"))
    on_gpu = replace(config, device=torch.device("cuda", 0), compile=replace(config.compile, cache_dir=tmp_path))
    with ThreadPoolExecutor(1) as caller:
        caller.submit(compile_kernels_ahead, on_gpu, FakeGroup(), KernelWorkers(0, None)).result()
    assert [path.is_relative_to(tmp_path / "kernels") for path in kept] == [True]


def test_what_a_part_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(mode="eager", dtype="float32", progress=False) as llm:
        runner = runner_of(llm)
        monkeypatch.setattr(runner.model, "run", lambda *arguments, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compile_kernels(llm.config, runner.step, KernelWorkers(0, None), SilentProgress())


def test_an_interrupt_does_not_wait_for_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives in the middle of a cold start."""
    started, go_on = [], threading.Event()

    def way_of_sampling() -> None:
        started.append(threading.get_ident())
        go_on.wait(60)

    def interrupted(*arguments: object, **options: object) -> None:
        go_on.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(warm_up, "ways_of_sampling", lambda *arguments: [way_of_sampling] * 200)
    with LLM(mode="eager", dtype="float32", progress=False) as llm:
        runner = runner_of(llm)
        monkeypatch.setattr(runner.model, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compile_kernels(llm.config, runner.step, KernelWorkers(0, None), SilentProgress())
    assert len(started) < 200


SHAPES = [(512, 48), (511, 2), (60, 48), (96, 48), (48, 48), (3, 40), (1, 1)]


def test_requests_without_keys_are_alike() -> None:
    """flash-attn 2 writes where they would be if each had the most tokens of any: that must be within its memory."""
    with LLM(mode="eager", progress=False, num_blocks=20, max_num_seqs=48, max_num_batched_tokens=512) as llm:
        step = runner_of(llm).step
        for num_tokens, num_requests in SHAPES:
            shape = BatchShape(num_tokens, num_requests, 64)
            batch = empty_batch(step.buffers, num_tokens, num_requests, shape.host_3)
            stage_empty(batch, step.buffers)
            step.states.writes.apply()
            prepare(batch, step.states, step.buffers)
            inputs = attention_inputs_of(step_of_batch(batch, step.buffers), "torch")
            counts = inputs.query_start_loc_R1.diff().tolist()
            num_decodes, most, _ = inputs.host_3.tolist()
            assert num_decodes == (num_requests if num_tokens == num_requests else 0), shape
            if num_decodes:
                assert counts == [1] * num_requests, shape
            else:
                with_some = sum(count > 0 for count in counts)
                assert counts == [most] * with_some + [0] * (num_requests - with_some), shape
                assert with_some > 0, shape
                assert with_some * max(2, most) <= num_tokens, shape
