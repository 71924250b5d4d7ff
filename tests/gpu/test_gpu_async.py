"""Steps launched ahead on a GPU: no wait in the steady state, the same tokens, no tensor of rows times vocabulary."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_engine.bench.shapes import write_shape
from compiled_engine.engine.core import EngineCore
from compiled_engine.engine.messages import EngineRequest
from compiled_engine.llm import LLM
from compiled_engine.options import EngineOptions
from compiled_engine.process.progress import SilentProgress
from compiled_engine.processes.start_cores import start_core
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]

# One of each kind of sampling.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.8},
    "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1},
    "edited": {"temperature": 0.8, "logit_bias": {5: 2.0}, "bad_words_token_ids": ((7, 8), (9,)), "min_tokens": 8},
    "logprobs": {"temperature": 0.8, "logprobs": 5},
}


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device without saying so is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "num_blocks": 4000,
    "compile_workers": 0,  # tests side by side have a core each
}


def engine(**options: Any) -> LLM:
    return LLM(progress=False, **OPTIONS | options)


@pytest.fixture(scope="module", params=["compiled", "graphed"])
def core(request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    options = resolve(EngineOptions(mode=request.param, **OPTIONS))
    with closing(start_core(options, SilentProgress())) as core:
        yield core


@pytest.mark.parametrize("kind", KINDS)
def test_a_steady_state_waits_for_nothing_but_results(kind: str, core: EngineCore) -> None:
    for i in range(12):
        params = SamplingParams(seed=i, max_tokens=200, ignore_eos=True, **KINDS[kind])
        core.add(EngineRequest(f"{kind} {i}", tuple(range(10, 30 + i)), params))
    for _ in range(6):
        core.step()
    with no_waiting():
        tokens = [output for _ in range(60) for output in core.step()]  # blocks of 16 tokens run out meanwhile
    assert len(tokens) == 60 * 12
    for i in range(12):
        core.abort(f"{kind} {i}")
    while core.has_unfinished():
        core.step()


def random_requests(count: int, seed: int) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    random_ = random.Random(seed)
    prompts, params = [], []
    for i in range(count):
        prompts.append({"prompt_token_ids": [random_.randrange(4096) for _ in range(random_.randrange(1, 60))]})
        kind = KINDS[random_.choice(list(KINDS))]
        max_tokens = max(random_.randrange(1, 30), kind.get("min_tokens", 1))
        params.append(SamplingParams(seed=i, max_tokens=max_tokens, **kind))
    return prompts, params


@pytest.mark.parametrize("num_blocks", [4000, 120])
def test_tokens_are_the_same_one_step_ahead(num_blocks: int) -> None:
    """Hundreds of random requests, also where they preempt each other; what differs has to be a near tie."""
    prompts, params = random_requests(600, 3)
    found = []
    for ahead in (True, False):
        with engine(mode="graphed", async_scheduling=ahead, num_blocks=num_blocks, enable_prefix_caching=False) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([tuple(output.outputs[0].token_ids) for output in outputs])
    different = sum(a != b for a, b in zip(*found, strict=True))
    print(f"{different} of {len(prompts)} differ")
    assert different <= 4  # batches differ in their size, and with it the last bits of logits


def test_a_device_that_is_behind_gets_each_prompt() -> None:
    """Something else holds the device up before each step, so rows are taken again while the prompts that had them are
    in flight."""
    prompts, _ = random_requests(120, 5)
    found: list[dict[str, list[int]]] = []
    for ahead in (False, True):
        changed = {"max_num_seqs": 16, "enable_prefix_caching": False, "async_scheduling": ahead}
        options = EngineOptions(**OPTIONS | changed)
        tokens: dict[str, list[int]] = {}
        with closing(start_core(resolve(options), SilentProgress())) as core:
            for i, prompt in enumerate(prompts):
                params = SamplingParams(max_tokens=1, temperature=0.0)
                core.add(EngineRequest(str(i), tuple(prompt["prompt_token_ids"]), params))
            while core.has_unfinished():
                if ahead:
                    torch.cuda._sleep(1 << 25)
                for output in core.step():
                    tokens[output.request_id] = list(output.new_token_ids)
        found.append(tokens)
    assert len(found[0]) == len(prompts)
    assert found[0] == found[1]


def test_logprobs_take_no_tensor_of_rows_times_vocabulary(tmp_path: Path) -> None:
    """256 rows of 151,936 logits: 20 log-probabilities of each, and of 256 prompt tokens."""
    shape = write_shape(tmp_path, "qwen3-0.6b")
    config = json.loads((shape / "config.json").read_text())
    (shape / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    options: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_num_seqs": 256,
        "max_num_batched_tokens": 512,
        "max_model_len": 512,
        "num_blocks": 9000,
        "compile_ranges": (),
        "graph_mode": "none",
    }
    with engine(model=shape, mode="compiled", **options) as llm:
        logits_bytes = 256 * llm.config.model.vocab_size * llm.config.model.dtype.itemsize

        def peak(**params: Any) -> int:
            prompts = [{"prompt_token_ids": [i, 1, 2]} for i in range(256)]
            sampling = SamplingParams(temperature=0.8, seed=1, max_tokens=4, ignore_eos=True, **params)
            llm.generate(prompts, sampling, use_tqdm=False)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            llm.generate(prompts, sampling, use_tqdm=False)
            return torch.cuda.max_memory_allocated() - before

        plain = peak()
        assert plain >= logits_bytes
        # Chunks in float32 of 16 MiB, a few of them at a time, and the results.
        for wanted in ({"logprobs": 20}, {"prompt_logprobs": 20, "logprobs": 20}):
            extra = peak(**wanted) - plain
            print(f"{wanted}: {extra / 2**20:.0f} MiB beyond the logits")
            assert extra < logits_bytes
