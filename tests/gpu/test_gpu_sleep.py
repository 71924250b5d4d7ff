"""Sleep on a GPU: memory goes back to the driver, and after waking the bits are the same without a capture."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint

from compiled_engine.engine.control import ControlError
from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_alone]

# Some 200 MiB of weights and 256 MiB of keys and values, so that what PyTorch keeps beside them does not count.
WIDE: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 1024,
}
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "progress": False,
    "skip_tokenizer_init": True,
    "enable_sleep_mode": True,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "num_blocks": 2048,
    "block_size": 16,
    "compile_workers": 0,
}
PROMPTS = [{"prompt_token_ids": [*range(start, start + 500)]} for start in (3, 1000, 2000, 3000)]
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2)
SAME = ("traces", "compiles", "captures")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, "llama", **WIDE)
    return folder


@pytest.fixture(scope="module", params=["eager", "graphed"])
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    with LLM(folder, mode=request.param, **OPTIONS) as llm:
        yield llm


def bits(llm: LLM) -> list[Any]:
    """Return tokens and log-probabilities, computed without cached prefixes."""
    llm.reset_prefix_cache()
    outputs = [llm.generate(prompt, PARAMS, use_tqdm=False)[0].outputs[0] for prompt in PROMPTS]
    return [
        (each.token_ids, [{i: p.logprob for i, p in row.items()} for row in each.logprobs or []]) for each in outputs
    ]


def free() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def large_bytes(llm: LLM) -> int:
    """Return the bytes of the weights and of the KV cache."""
    executor: Any = llm.core.executor
    stored = executor.runner.calls["weights.apply"].__self__.weights.stored
    return sum(each.nbytes for each in (*stored.filled(), *executor.runner.model.kv_caches))


def addresses(llm: LLM) -> list[int]:
    executor: Any = llm.core.executor
    stored = executor.runner.calls["weights.apply"].__self__.weights.stored
    return [each.data_ptr() for each in (*stored.tensors.values(), *executor.runner.model.kv_caches)]


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_given_back_and_the_bits_are_the_same_afterwards(level: int, llm: LLM, folder: Path) -> None:
    expected, counts, places = bits(llm), llm.metrics(), addresses(llm)
    before = free()
    llm.sleep(level)
    given_back = free() - before
    assert given_back >= 0.95 * large_bytes(llm)
    with pytest.raises(RuntimeError, match="no step is run"):
        bits(llm)
    llm.wake_up(["weights"])
    if level == 2:
        llm.update_weights(folder)
    assert llm.is_sleeping()
    llm.wake_up(tags=["kv_cache"])
    assert not llm.is_sleeping()
    assert addresses(llm) == places
    assert bits(llm) == expected
    after = llm.metrics()
    assert {name: after[name] for name in SAME} == {name: counts[name] for name in SAME}


def test_twenty_cycles_leave_memory_as_it_was(llm: LLM, folder: Path) -> None:
    expected = bits(llm)
    llm.sleep(1)
    llm.wake_up()
    held = []
    for number in range(20):
        level = 1 + number % 2
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.update_weights(folder)
        assert bits(llm) == expected
        held.append(free())
    assert max(held) - min(held) <= 16 << 20
    assert held[-1] >= held[1] - (4 << 20)


def test_memory_that_a_trainer_uses_keeps_the_engine_asleep(llm: LLM) -> None:
    """It wakes once the memory is free."""
    expected = bits(llm)
    llm.sleep(1)
    torch.cuda.empty_cache()
    trainers = torch.empty(free() - (64 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(ControlError, match=r"GiB cannot be mapped again: cuMemCreate .*CUDA_ERROR_OUT_OF_MEMORY"):
        llm.wake_up()
    assert llm.is_sleeping()
    with pytest.raises(ControlError, match="the weights sleep; wake them first"):
        llm.update_weights({})
    del trainers
    torch.cuda.empty_cache()
    llm.wake_up()
    assert bits(llm) == expected


def test_a_kept_stream_continues_after_the_sleep(llm: LLM) -> None:
    (expected,) = llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)
    stream = llm.stream(PROMPTS[0], PARAMS)
    for _ in range(5):
        next(stream)
    llm.sleep(1, mode="keep")
    llm.wake_up()
    (*_, last) = stream
    assert last.outputs[0].token_ids == expected.outputs[0].token_ids
    llm.core.check_integrity()


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}], ids=["plain", "quantised"])
def test_an_engine_that_may_sleep_computes_what_others_do_and_frees_its_memory(options: Any, folder: Path) -> None:
    """Also asleep: closing it frees everything."""
    expected = None
    for sleeps in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        before = free()
        with LLM(folder, mode="graphed", **OPTIONS | options | {"enable_sleep_mode": sleeps}) as llm:
            if expected is None:
                expected = bits(llm)
            assert bits(llm) == expected
            size = llm.metrics()["kv_cache_bytes"]
            if sleeps:
                llm.sleep(2)
                llm.wake_up()
                llm.update_weights(folder)
                assert bits(llm) == expected
                llm.sleep(1)
        del llm
        gc.collect()
        torch.cuda.empty_cache()
        assert before - free() < size // 2
