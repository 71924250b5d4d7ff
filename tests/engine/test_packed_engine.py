"""Checkpoints in four bits through the whole engine: each layout beside an oracle, odd sizes, and several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import LINEARS, make_adapter
from adapter_folders import OPTIONS as ADAPTERS
from checkpoints import make_checkpoint
from packed_checkpoints import PACKINGS, Packing, write_packed
from safetensors.torch import load_file, save_file
from test_quantised_engine import IDS, ODD, ONE_LAYER, OPTIONS, PROMPTS, compare

from compiled_engine import LLM, LoRARequest, SamplingParams

IGNORED = ["lm_head", "model.layers.2.mlp.down_proj"]
COMPILED = "gptq, reordered"
DECODED = pytest.mark.shown_by(
    "engine/test_packed_engine.py::test_each_layout_is_decoded",
    "passes/test_quantise.py::test_every_pass_keeps_its_contract_and_its_verifier",
)


@pytest.mark.parametrize("name", PACKINGS)
def test_each_layout_is_decoded(name: str, bundled_model_path: Path, bundled_tokenizer: Any, tmp_path: Path) -> None:
    oracle = write_packed(bundled_model_path, tmp_path, PACKINGS[name], IGNORED)
    prompts = [bundled_tokenizer.hf(text)["input_ids"] for text in PROMPTS]
    compare(tmp_path, oracle, prompts, exact=True, mode="eager", strict_passes=False)


@pytest.mark.parametrize("name", [name if name == COMPILED else pytest.param(name, marks=DECODED) for name in PACKINGS])
def test_each_layout_computes_what_its_codes_stand_for(
    name: str, bundled_model_path: Path, bundled_tokenizer: Any, tmp_path: Path
) -> None:
    oracle = write_packed(bundled_model_path, tmp_path, PACKINGS[name], IGNORED)
    prompts = [bundled_tokenizer.hf(text)["input_ids"] for text in PROMPTS]
    compare(tmp_path, oracle, prompts, exact=True, compile_ranges=())


KINDS = ("compressed-tensors, zero points", COMPILED, "awq")
ZEROS, REORDERED, AWQ = (PACKINGS[name] for name in KINDS)
# Columns of a row-parallel linear's share do not end with groups of 128.
SIZES = ODD | {"hidden_size": 216, "vocab_size": 136}


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(
    ("family", "packing", "ignored", "changes", "options"),
    [
        ("llama", ZEROS, [], {"attention_bias": True, "tie_word_embeddings": False}, {"compile_ranges": (8,)}),
        ("qwen3", AWQ, ["lm_head"], {"tie_word_embeddings": True}, {"compile_ranges": ()}),
        ("phi3", REORDERED, ["lm_head"], {}, {"compile_ranges": ()}),
        ("llama", REORDERED, ["lm_head"], {"tie_word_embeddings": False}, {"model_impl": "transformers"}),
    ],
    ids=["llama, quantised head", "qwen3, tied", "phi3, fused", "transformers' code"],
)
def test_odd_sizes(
    family: str, packing: Packing, ignored: list[str], changes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path / "plain", family, **SIZES | ONE_LAYER | changes)
    oracle = write_packed(tmp_path / "plain", tmp_path / "packed", packing, ignored)
    compare(tmp_path / "packed", oracle, IDS, exact=True, **options)


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("packing", [ZEROS, REORDERED, AWQ], ids=KINDS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_have_parts_of_groups(packing: Packing, num_ranks: int, tmp_path: Path) -> None:
    """Shares end inside groups, and reordered columns are divided: those linears are decoded while they are loaded."""
    sizes = SIZES | ONE_LAYER | {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 352}
    make_checkpoint(tmp_path / "plain", "llama", **sizes | {"tie_word_embeddings": False})
    oracle = write_packed(tmp_path / "plain", tmp_path / "packed", packing, ["lm_head"])
    ranks: dict[str, Any] = {"tensor_parallel_size": num_ranks, "strict_passes": packing is not REORDERED}
    compare(tmp_path / "packed", oracle, IDS, exact=True, compile_ranges=(), **ranks)


@pytest.mark.shown_by("passes/test_parameter.py::test_orders_of_columns_that_differ_cannot_be_merged")
def test_orders_of_columns_that_differ_are_refused_with_a_way_out(tmp_path: Path) -> None:
    """k's columns are reordered otherwise than q's and v's."""
    make_checkpoint(tmp_path / "plain", "llama", **SIZES | ONE_LAYER | {"tie_word_embeddings": False})
    oracle: Any = write_packed(tmp_path / "plain", tmp_path / "packed", REORDERED, ["lm_head"])
    module = oracle.model.layers[0].self_attn.k_proj
    path = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.k_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"the orders of the columns of .*k_proj.* differ"):
        LLM(tmp_path / "packed", **OPTIONS, compile_ranges=(), skip_tokenizer_init=True)
    module.weight.copy_(unpacked_gptq(tensors, "model.layers.0.self_attn.k_proj"))
    apart: dict[str, Any] = {"disable_passes": ("merge_linears",), "strict_passes": False, "compile_ranges": ()}
    compare(tmp_path / "packed", oracle, IDS, exact=True, **apart)


def unpacked_gptq(tensors: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """The values [N, K] of a linear in GPTQ's first format."""
    words, zeros, scales, groups = (tensors[f"{module}.{kind}"] for kind in ("qweight", "qzeros", "scales", "g_idx"))
    K, N = 8 * len(words), words.shape[1]
    values_NK = torch.zeros(N, K)
    for k in range(K):
        group = int(groups[k])
        for n in range(N):
            code = int(words[k // 8, n]) >> 4 * (k % 8) & 15
            zero = (int(zeros[group, n // 8]) >> 4 * (n % 8) & 15) + 1
            values_NK[n, k] = (code - zero) * float(scales[group, n])
    return values_NK


@pytest.mark.shown_by(
    "passes/test_parameter.py::test_packed_codes_have_the_shape_and_shard_of_their_weight",
    "engine/test_adapters_beside.py::test_with_codes_a_request_is_near_its_merged_model",
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_adapters_beside_packed_weights(num_ranks: int, tmp_path: Path) -> None:
    """An adapter adds to the linears of the decoded model, whatever the order of their columns."""
    sizes = ODD | {"hidden_size": 216, "num_hidden_layers": 2, "tie_word_embeddings": True, "vocab_size": 136}
    model = make_checkpoint(tmp_path / "plain", "qwen3", **sizes)
    oracle: Any = write_packed(tmp_path / "plain", tmp_path / "packed", REORDERED, ["lm_head"])
    oracle.save_pretrained(tmp_path / "decoded")
    make_adapter(tmp_path / "adapter", model, 8, targets=LINEARS)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, prompt_logprobs=0, detokenize=False)
    found = []
    for folder in ("packed", "decoded"):
        options = ADAPTERS | {"compile_ranges": (), "tensor_parallel_size": num_ranks, "skip_tokenizer_init": True}
        with LLM(tmp_path / folder, **options) as llm:
            requests: list[Any] = [None, *(LoRARequest("own", 1, tmp_path / "adapter") for _ in IDS[1:])]
            prompts = [{"prompt_token_ids": ids} for ids in IDS]
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
        found.append([list(each.outputs[0].token_ids) for each in outputs])
    assert found[0] == found[1]
