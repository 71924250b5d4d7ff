"""Models with multi-head latent attention: right in chunks, beside others, preempted, with drafts, and on two ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import assert_is_of, make_adapter, merge
from families import family, write_checkpoint
from family_comparison import difference_after_passes, difference_of, fused_model
from greedy_engines import PROMPTS, SMALL, check_in_company, expected_in_company, generated, greedy
from latent_cases import round_rows
from transformers.models.youtu.modeling_youtu import YoutuAttention

from compiled_engine.attention.latents import LatentHeads, expands
from compiled_engine.features.adapters.lora_request import LoRARequest
from compiled_engine.llm import LLM
from compiled_engine.other_engines.translate import make_options
from compiled_engine.resolve.engine import resolve
from compiled_engine.sampling.params import SamplingParams

# Of log-probabilities with rows of 8 bits. Elements between two codes are rounded up or down by chance.
MEAN_OF_ROUNDED = 2e-3
FAMILIES = ("deepseek_v2", "deepseek_v3", "sarvam_mla", "glm4_moe_lite", "axk1", "minicpm3", "youtu")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """In eager code, and in the graph after all passes. Without --all of one family."""
    oracle = write_checkpoint(tmp_path, family(name))
    eager = difference_of(tmp_path, oracle, {"mode": "eager", "device": "cpu"})
    assert eager.is_right(torch.float32), eager
    model = fused_model(tmp_path, {"device": "cpu"}, verify=True)
    sizes = model.config.model
    # A row of the cache has a token's latent and the rotated part of its keys, and is the key of all heads.
    assert sizes.latent_dim == 24
    assert sizes.kv_shapes(7, 16) == [(7, 1, 16, 1, 24 + 8)] * sizes.num_layers
    fused = difference_after_passes(model, oracle)
    assert fused.is_right(torch.float32), fused
    reports = {report.name: report for report in model.reports}
    assert reports["foreign_attention"].matches == model.config.model.num_layers
    # DeepSeek-V2 rotates by products of complex numbers.
    assert reports.keys() & {"complex_numbers"} == ({"complex_numbers"} if name == "deepseek_v2" else set())
    assert all(reports[each].matches == reports[each].contract > 0 for each in reports.keys() & {"complex_numbers"})


@pytest.mark.usefixtures("one_thread")
def test_tokens_are_transformers_whatever_runs_beside_them(tmp_path: Path) -> None:
    oracle = write_checkpoint(tmp_path, family("youtu"))
    expected = expected_in_company(tmp_path, oracle)
    check_drafts(tmp_path, expected)
    check_cached_prefix(tmp_path, oracle)


def check_drafts(folder: Path, expected: list[list[int]], **options: Any) -> None:
    ngrams = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    drafted, metrics = generated(folder, mode="eager", max_num_seqs=5, speculative_config=ngrams, **options)
    assert drafted == expected
    assert metrics["draft_tokens"] > 0


def check_cached_prefix(folder: Path, oracle: Any) -> None:
    """Rows of a cached prefix are expanded for a long question about it, and not for a short one."""
    prefix, questions = list(range(20, 44)), ([], [1, 2], list(range(30, 70)))
    params = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
    with LLM(folder, **SMALL, mode="eager", block_size=4) as llm:
        for question in questions:
            (output,) = llm.generate({"prompt_token_ids": prefix + question}, params)
            assert list(output.outputs[0].token_ids) == greedy(oracle, prefix + question, 4)
            assert output.num_cached_tokens == (len(prefix) if question else 0)
    crossover = LatentHeads(4, 16, 8, 24, 12).crossover
    assert [expands(len(each), len(prefix + each), crossover) for each in questions[1:]] == [False, True]


@pytest.mark.usefixtures("one_thread")
def test_rows_that_are_expanded_in_another_way_are_expanded_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values are cached, the smaller ones filled with zeros."""
    expand = YoutuAttention.expand_kv

    def otherwise(self: YoutuAttention, *rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = expand(self, *rows)
        return keys, values.tanh()

    monkeypatch.setattr(YoutuAttention, "expand_kv", otherwise)
    # A size of its own: descriptions of equal configurations are kept.
    alone = replace(family("youtu"), changes={**family("youtu").changes, "vocab_size": 97})
    oracle = write_checkpoint(tmp_path, alone)
    model = resolve(make_options({"model": tmp_path, "device": "cpu", "dtype": "float32"})).model
    assert model.latent_dim == 0
    assert model.kv_shapes(7, 16) == [(7, 2, 16, 4, 24)] * 3
    tokens, _ = generated(tmp_path, mode="eager")
    assert tokens == [greedy(oracle, prompt) for prompt in PROMPTS]


EIGHT_BITS = pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in ("deepseek_v3", "glm4_moe_lite") for dtype in ("int8", "fp8")]
)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.product(one_in=1000, each=("dtype",))
@EIGHT_BITS
def test_rows_of_8_bits(name: str, dtype: str, tmp_path: Path) -> None:
    """Log-probabilities are those of transformers with rounded rows, and the same tokens come in any company.

    Without --all one model for each format. Weights are so large that rounding changes probabilities much.
    """
    oracle = write_checkpoint(tmp_path, family(name))
    options: dict[str, Any] = {"mode": "eager", "device": "cpu", "kv_cache_dtype": dtype}
    exact = difference_of(tmp_path, oracle, options)
    assert 1e-2 < exact.mean < 1, exact
    round_rows(oracle, dtype)
    found = difference_of(tmp_path, oracle, options)
    assert found.mean < MEAN_OF_ROUNDED, found
    options = {"device": "cpu", "kv_cache_dtype": dtype, "enable_prefix_caching": False}
    whole, _ = generated(tmp_path, mode="eager", **options)
    check_in_company(tmp_path, whole, **options)
    check_drafts(tmp_path, whole, **options)
    params = SamplingParams(temperature=0, max_tokens=len(whole[1]), detokenize=False)
    with LLM(tmp_path, **SMALL, mode="eager", block_size=4, kv_cache_dtype=dtype) as llm:
        outputs = [llm.generate({"prompt_token_ids": PROMPTS[1]}, params)[0] for _ in range(2)]
    assert [list(output.outputs[0].token_ids) for output in outputs] == [whole[1]] * 2
    assert [output.num_cached_tokens for output in outputs] == [0, 44]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.product(one_in=1000)
@EIGHT_BITS
def test_graphs_with_rows_of_8_bits(name: str, dtype: str, tmp_path: Path) -> None:
    """Without --all of one model in one format, which is a field of the op."""
    oracle = write_checkpoint(tmp_path, family(name))
    round_rows(oracle, dtype)
    model = fused_model(tmp_path, {"device": "cpu", "kv_cache_dtype": dtype}, verify=True)
    sizes = model.config.model
    assert sizes.kv_shapes(7, 16, model.config.cache_dtype) == [(7, 1, 16, 1, 24 + 2 * 8 + 2)] * sizes.num_layers
    of_block = sizes.num_layers * model.config.cache.block_size * (24 + 2 * 8 + 2)
    assert f" {of_block:,} bytes" in model.config.reasons["model.latent_dim"]
    found = difference_after_passes(model, oracle)
    assert found.mean < MEAN_OF_ROUNDED, found


@pytest.mark.usefixtures("one_thread")
def test_adapters_of_the_weight_that_expands_rows_are_refused(tmp_path: Path) -> None:
    """Those of other linears have an effect, that of the same weights merged."""
    model = write_checkpoint(tmp_path / "model", family("youtu"))
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0, detokenize=False)
    prompt = {"prompt_token_ids": PROMPTS[1]}
    with LLM(tmp_path / "model", **SMALL, mode="eager", enable_lora=True) as llm:
        refused = make_adapter(tmp_path / "refused", model, targets=("kv_b_proj",))
        with pytest.raises(ValueError, match=r"the base model has no linear .*kv_b_proj"):
            llm.generate(prompt, params, lora_request=LoRARequest("refused", 1, str(refused)))
        adapter = make_adapter(tmp_path / "adapter", model, targets=("q_a_proj", "kv_a_proj_with_mqa", "o_proj"))
        (output,) = llm.generate(prompt, params, lora_request=LoRARequest("adapter", 2, str(adapter)))
    assert_is_of(merge(model, adapter), output)


# Every rank has all rows, which are rounded as those of one rank.
RANKS_SHOWN = pytest.mark.shown_by(
    "models/test_latent_models.py::test_two_ranks_give_the_log_probabilities_of_transformers",
    "models/test_latent_models.py::test_rows_of_8_bits",
)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("dtype", ["auto", pytest.param("fp8", marks=RANKS_SHOWN)])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"])
def test_two_ranks_give_the_log_probabilities_of_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    """Without --all of one family."""
    oracle = write_checkpoint(tmp_path, family(name).to_divide())
    options: dict[str, Any] = {"mode": "eager", "device": "cpu", "tensor_parallel_size": 2, "kv_cache_dtype": dtype}
    if dtype != "auto":
        round_rows(oracle, dtype)
    difference = difference_of(tmp_path, oracle, options)
    assert difference.mean < MEAN_OF_ROUNDED if dtype != "auto" else difference.is_right(torch.float32), difference
