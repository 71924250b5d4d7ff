"""The caller's settings of torch, made before or while the engine runs, do not affect it; and it leaves none behind."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_engine.llm import LLM
from compiled_engine.sampling.params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=6)
# Engines of other tests share what is compiled with these options.
OPTIONS: dict[str, Any] = {"device": "cpu", "progress": False, "max_num_seqs": 2}


def complete(mode: str, **more: Any) -> tuple[int, ...]:
    with LLM(mode=mode, **OPTIONS | more) as llm:
        return tuple(llm.generate("def f(", PARAMS)[0].outputs[0].token_ids)


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_autocast_a_default_dtype_and_grad_mode_change_nothing(dtype: torch.dtype, tmp_path: Path) -> None:
    """Neither what is computed nor what is compiled, here anew."""
    expected = complete("eager")
    torch.set_default_dtype(dtype)
    try:
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
            assert complete("eager") == expected
            assert complete("graphed", cache_dir=tmp_path) == expected
    finally:
        torch.set_default_dtype(torch.float32)


def large_tensors() -> dict[int, torch.Tensor]:
    """Return tensors of at least 64 KiB: weights and KV caches, but no buffers of the runner and no fake tensors."""
    gc.collect()
    kinds = (torch.Tensor, torch.nn.Parameter)
    return {id(thing): thing for thing in gc.get_objects() if type(thing) in kinds and thing.nbytes >= 1 << 16}


def test_closing_frees_weights_and_kv_cache_at_once() -> None:
    before = large_tensors()
    llm = LLM(mode="compiled", **OPTIONS)
    made = [weakref.ref(tensor) for key, tensor in large_tensors().items() if key not in before]
    assert len(made) > 20
    gc.disable()
    try:
        llm.close()
        assert [tensor() for tensor in made] == [None] * len(made)
    finally:
        gc.enable()


def test_the_callers_own_compile_keeps_working_beside_the_engine() -> None:
    @torch.compile(backend="eager")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert doubled(torch.ones(3)).sum() == 6
    complete("compiled")
    assert doubled(torch.ones(3)).sum() == 6
    assert doubled(torch.ones(5)).sum() == 10
