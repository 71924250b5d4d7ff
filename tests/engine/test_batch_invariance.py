"""Batch-invariant engines give a request the same bits in every batch, and refuse by name what cannot have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import make_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from invariant_requests import alone, requests, together
from tokenizers import Tokenizer
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_engine import LLM, SamplingParams
from compiled_engine.options import EngineOptions
from compiled_engine.passes.linear.invariant_linear import InvariantLinear
from compiled_engine.resolve.engine import resolve

pytestmark = pytest.mark.usefixtures("one_thread")
COUNT, LONGEST = 20, 110
# Few tokens a step, so that prompts come in chunks, and few blocks, so that requests are preempted.
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "progress": False,
    "compile_workers": 0,
    "max_model_len": 128,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 80,
    "block_size": 16,
    "num_blocks": 30,
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


class Setting(NamedTuple):
    engines: dict[str, LLM]
    prompts: list[list[int]]
    params: list[SamplingParams]
    expected: list[Any]


@pytest.fixture(scope="module")
def setting(bundled_model_path: Path, bundled_tokenizer: Tokenizer) -> Iterator[Setting]:
    ids = bundled_tokenizer.encode((bundled_model_path / "held_out.txt").read_text()[:9000]).ids
    prompts, params = requests(ids, COUNT, LONGEST)
    with (
        LLM(**ENGINE, batch_invariant=True) as plain,
        LLM(**ENGINE, batch_invariant=True, speculative_config=DRAFTS) as drafting,
    ):
        yield Setting({"plain": plain, "drafting": drafting}, prompts, params, alone(plain, prompts, params))


@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=64), st.sampled_from(["plain", "drafting"]), st.booleans()
)
def test_a_request_has_the_same_bits_in_every_batch(
    setting: Setting, chosen: list[int], name: str, cached: bool
) -> None:
    llm = setting.engines[name]
    if not cached:
        llm.reset_prefix_cache()
    found = together(llm, [setting.prompts[n] for n in chosen], [setting.params[n] for n in chosen])
    assert [n for n, result in zip(chosen, found, strict=True) if result != setting.expected[n]] == []


@pytest.mark.parametrize("name", ["plain", "drafting"])
def test_a_full_batch_in_chunks_with_preemptions_has_the_same_bits(setting: Setting, name: str) -> None:
    llm, chosen = setting.engines[name], [n % COUNT for n in range(64)]
    before = llm.metrics()
    found = together(llm, [setting.prompts[n] for n in chosen], [setting.params[n] for n in chosen])
    after = llm.metrics()
    assert [n for n, result in zip(chosen, found, strict=True) if result != setting.expected[n]] == []
    assert after["preemptions"] > before["preemptions"]
    assert after["prefix_hits"] > before["prefix_hits"]
    if name == "drafting":
        assert after["accepted_tokens"] > before["accepted_tokens"]


def test_the_engine_without_the_mode_has_other_bits_in_some_batch(setting: Setting) -> None:
    """Without this the mode would be for nothing. The log-probabilities differ, by rounding."""
    with LLM(**ENGINE) as llm:
        expected = alone(llm, setting.prompts, setting.params)
        llm.reset_prefix_cache()
        assert together(llm, setting.prompts, setting.params) != expected


def test_the_librarys_functions_of_angles_have_the_same_bits_wherever_an_element_is() -> None:
    """Rotary angles are the one function of the library that invariant engines need on a CPU."""
    x = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0)) * 4000
    for function in (torch.cos, torch.sin):
        whole = function(x)
        for first, count in ((first, 1 + first % 67) for first in range(0, 60_000, 61)):
            assert torch.equal(function(x[first : first + count]), whole[first : first + count])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "eager"}, "batch_invariant is True, but the mode is eager"),
        ({"attention_backend": "torch"}, "attention_backend is 'torch', but batch_invariant is True"),
        ({"disable_passes": ("rms_norm",)}, "disable_passes is .*, but batch_invariant is True"),
        ({"compile_ranges": (8,)}, "compile_ranges is .*, but batch_invariant is True"),
        ({"enable_lora": True}, "enable_lora is True, but batch_invariant is True"),
        ({"dtype": "bfloat16"}, "dtype is torch.bfloat16; allowed: torch.float32"),
        ({"quantization": "fp8"}, "batch_invariant is True, but linears are quantised, which the library computes"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(EngineOptions(**{"device": "cpu", "batch_invariant": True} | options))


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    with pytest.raises(ValueError, match="batch_invariant is True, but experts compute their tokens together"):
        resolve(EngineOptions(tmp_path, device="cpu", batch_invariant=True))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: torch.softmax(x, -1), "aten._softmax.default"),
        (lambda x: torch.bmm(x[None], x.t()[None]), "aten.bmm.default"),
        (lambda x: x.tanh() + 1, "aten.tanh.default"),
        (lambda x: x.mean(-1), "aten.mean.dim"),
    ],
    ids=["softmax", "product", "tanh", "mean"],
)
def test_a_model_with_another_op_is_refused_by_its_name(function: Any, name: str) -> None:
    graph: fx.Graph = make_fx(function)(torch.randn(4, 16)).graph
    with pytest.raises(ValueError, match=f"batch_invariant is True, but the model computes .* by {name}"):
        InvariantLinear().run(graph)
