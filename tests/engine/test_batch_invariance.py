"""Batch-invariant engines give a request the same bits in every batch, and refuse by name what cannot have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from invariant_requests import alone, requests, together
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from compiled_engine import LLM, SamplingParams
from compiled_engine.frontend.tokenizer import Tokenizer
from compiled_engine.options import EngineOptions
from compiled_engine.parallel.rank_share import local_model
from compiled_engine.passes.invariance.batch_invariance import BatchInvariance
from compiled_engine.resolve.engine import resolve

pytestmark = pytest.mark.usefixtures("one_thread")
COUNT, LONGEST = 20, 90
# Few tokens a step, so that prompts come in chunks, and few blocks, so that requests are preempted.
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "progress": False,
    "compile_workers": 0,
    "max_model_len": 128,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 80,
    "block_size": 16,
    "num_blocks": 18,
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


class Setting(NamedTuple):
    engines: dict[str, LLM]
    prompts: list[list[int]]
    params: list[SamplingParams]
    expected: list[Any]


@pytest.fixture(scope="module")
def setting(bundled_model_path: Path, bundled_tokenizer: Tokenizer) -> Iterator[Setting]:
    ids = bundled_tokenizer.encode((bundled_model_path / "held_out.txt").read_text()[:9000])
    prompts, params = requests(ids, COUNT, LONGEST)
    with (
        LLM(**ENGINE, batch_invariant=True) as plain,
        LLM(**ENGINE, batch_invariant=True, speculative_config=DRAFTS) as drafting,
    ):
        yield Setting({"plain": plain, "drafting": drafting}, prompts, params, alone(plain, prompts, params))


@settings(max_examples=4, deadline=None, derandomize=True, database=None)
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
    llm, before = setting.engines[name], setting.engines[name].metrics()
    for chosen in ([n % COUNT for n in range(64)], [0, 10] * 16):  # the latter get so many tokens that blocks run out
        found = together(llm, [setting.prompts[n] for n in chosen], [setting.params[n] for n in chosen])
        assert [n for n, result in zip(chosen, found, strict=True) if result != setting.expected[n]] == []
    after = llm.metrics()
    assert after["prefix_hits"] > before["prefix_hits"]
    assert after["preemptions"] > before["preemptions"]
    if name == "drafting":
        assert after["accepted_tokens"] > before["accepted_tokens"]


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
        (
            {"sequence_parallel": True, "tensor_parallel_size": 2},
            "sequence_parallel is True, but batch_invariant is True",
        ),
        ({"enable_lora": True}, "enable_lora is True, but batch_invariant is True"),
        ({"dtype": "bfloat16"}, "dtype is torch.bfloat16; allowed: torch.float32"),
        ({"quantization": "fp8"}, "batch_invariant is True, but linears are quantised, which the library computes"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(EngineOptions(**{"device": "cpu", "batch_invariant": True} | options))


def test_each_rank_has_the_whole_vocabulary() -> None:
    options: dict[str, Any] = {"device": "cpu", "tensor_parallel_size": 2}
    configs = [resolve(EngineOptions(**options, batch_invariant=on)) for on in (True, False)]
    whole, divided = (local_model(config).vocab_size / config.model.vocab_size for config in configs)
    assert (whole, divided) == (1, 0.5)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: torch.softmax(x, 0), "aten._softmax.default"),
        (lambda x: torch.bmm(x[None], x.t()[None]), "aten.bmm.default"),
        (lambda x: x.tanh() + 1, "aten.tanh.default"),
        (lambda x: x.mean(0), "aten.mean.dim"),
        (lambda x: x.scatter(1, x.long() * 0, x, reduce="add"), "aten.scatter.reduce"),
    ],
    ids=["softmax", "product", "tanh", "mean", "scatter"],
)
def test_a_model_with_another_op_is_refused_by_its_name(function: Any, name: str) -> None:
    graph: fx.Graph = make_fx(function)(torch.randn(4, 16)).graph
    with pytest.raises(ValueError, match=f"batch_invariant is True, but the model computes .* by {name}"):
        BatchInvariance().run(graph)


def any_number_of_rows(function: Any, x: torch.Tensor) -> fx.Graph:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * (x.dim() - 1)])
    with mode:
        graph: fx.Graph = make_fx(function)(mode.from_tensor(x, symbolic_context=context)).graph
    return graph


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x.topk(2, 0)[0], "aten.topk.default"),
        (lambda x: x.gather(0, x.long() * 0), "aten.gather.default"),
        (lambda x: x.scatter(0, x.long() * 0, x), "aten.scatter.src"),
        (lambda x: x[1:], "aten.slice.Tensor"),
        (lambda x: x + x[0], "aten.select.int"),
        (lambda x: x.split(x.shape[0] - 1)[0], "aten.split.Tensor"),
        (lambda x: torch.cat((x, x)), "aten.cat.default"),
        (lambda x: torch.index_select(x, 0, x[:, 0].long()), "aten.index_select.default"),
        (lambda x: torch.embedding(x, x[:, 0].long()), "aten.embedding.default"),
        (lambda x: x.t().sum(-1), "compiled_engine.row_function.default"),
        (lambda x: x.t().softmax(-1), "compiled_engine.row_function.default"),
        (lambda x: x.t().reshape(x.shape), "aten._unsafe_view.default"),
        (lambda x: x + torch.arange(x.shape[0])[:, None], "aten.arange.default"),
    ],
    ids=lambda value: value.removeprefix("aten.") if isinstance(value, str) else "",
)
def test_moves_from_one_token_to_another_are_refused(function: Any, name: str) -> None:
    """In a graph with any number of tokens, each of which has 16 elements."""
    graph = any_number_of_rows(function, torch.randn(5, 16))
    with pytest.raises(ValueError, match=f"the model computes .* by {name} .*, so that a token's values depend on"):
        BatchInvariance().run(graph)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.topk(2, 1)[0].sum(-1),
        lambda x: torch.cat((x, x[:, 3:5]), 1).t().unsqueeze(0),
        lambda x: x[:].view(x.shape[0], 4, 4).mT.reshape(4 * x.shape[0], 4).softmax(-1).view(x.shape),
        lambda x: x.scatter(1, x.topk(3)[1], 0.0),
    ],
)
def test_moves_within_a_token_stay(function: Any) -> None:
    graph = any_number_of_rows(function, x := torch.randn(5, 16))
    BatchInvariance().run(graph)
    torch.testing.assert_close(fx.GraphModule(torch.nn.Module(), graph)(x), function(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["softmax", "sum", "mean"])
def test_rows_in_16_bits_are_added_in_one_order(name: str, dtype: torch.dtype) -> None:
    """As routers normalise the weights of experts (LFM2-MoE): right, and with the same bits in every batch."""
    function = getattr(torch, name)
    x = torch.randn(300, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    graph = any_number_of_rows(lambda x: function(x, -1), x)
    BatchInvariance().run(graph)
    found = fx.GraphModule(torch.nn.Module(), graph)
    assert [torch.ops.compiled_engine.row_function.default] == [
        node.target for node in graph.nodes if "row_function" in str(node.target)
    ]
    whole = found(x)
    torch.testing.assert_close(whole, function(x.double(), -1).to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert all(
        torch.equal(found(x[first : first + n]), whole[first : first + n]) for n in (1, 2, 33) for first in (0, 7)
    )
