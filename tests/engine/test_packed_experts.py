"""Experts in four bits through the whole engine: GPT-OSS's, those of other formats, and made while one is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from mxfp4_checkpoint import write_mxfp4
from nvfp4_checkpoints import COMPRESSED, MODELOPT, write_nvfp4
from packed_checkpoints import PACKINGS, Packing, write_packed
from safetensors.torch import load_file, save_file
from test_quantised_engine import IDS, OPTIONS, compare
from test_quantised_experts import DIVIDED, LAYERS, MOE, ROUTERS

from compiled_engine import LLM, SamplingParams


def matched(metrics: dict[str, Any]) -> list[int]:
    passes = metrics["passes"]
    found = [each["quantise_experts"] for name, each in passes.items() if not name.startswith("logits")]
    assert all(each["matches"] == each["contract"] for each in found)
    return [each["matches"] for each in found]


def test_experts_of_gpt_oss_stay_in_four_bits(tmp_path: Path) -> None:
    oracle = write_mxfp4(tmp_path)
    prompts = [[token % oracle.config.vocab_size for token in prompt] for prompt in IDS]
    metrics = compare(tmp_path / "packed", oracle, prompts, exact=True)  # its pass is verified in passes
    num_layers = oracle.config.num_hidden_layers
    assert set(matched(metrics)) == {2 * num_layers}
    compare(tmp_path / "packed", oracle, prompts, exact=True, mode="eager", strict_passes=False)


# Eager ranks decode their shares. Codes of a rank's columns are checked as parameters, and compiled ranks read codes as
# those of NVFP4 do.
SHARES = pytest.mark.shown_by(
    "models/test_mxfp4.py::test_shares_that_end_inside_of_blocks_are_decoded",
    "passes/test_quantised_parameters.py::test_matrices_stored_by_columns_have_codes_by_rows",
    "engine/test_packed_experts.py::test_ranks_have_parts_of_the_experts_of_gpt_oss",
    "engine/test_packed_experts.py::test_experts_in_nvfp4_stay_in_codes",
)


@pytest.mark.parametrize(
    ("num_ranks", "mode"),
    [(2, "eager"), *(pytest.param(*each, marks=SHARES) for each in ((2, "compiled"), (4, "compiled"), (4, "eager")))],
)
def test_ranks_have_parts_of_the_experts_of_gpt_oss(num_ranks: int, mode: str, tmp_path: Path) -> None:
    """Rows of gate and up alternate, one rank adds the bias of the sum, and shares of 48 and 24 columns end inside
    groups of 32."""
    oracle = write_mxfp4(tmp_path, num_layers=1)
    prompts = [[token % oracle.config.vocab_size for token in prompt] for prompt in IDS]
    given = {"compile_ranges": ()} if mode == "compiled" else {"strict_passes": False}
    compare(tmp_path / "packed", oracle, prompts, exact=True, mode=mode, tensor_parallel_size=num_ranks, **given)


def test_random_weights_of_gpt_oss(tmp_path: Path) -> None:
    """Codes are of all kinds, and values as large as those of other weights. It needs the same compiled
    model as the test of the codes."""
    oracle = write_mxfp4(tmp_path)
    ids = [token % oracle.config.vocab_size for token in IDS[3]]
    options = OPTIONS | {"load_format": "dummy", "skip_tokenizer_init": True, "compile_ranges": ()}
    with LLM(tmp_path / "packed", **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=1, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        assert set(matched(llm.metrics())) == {2 * oracle.config.num_hidden_layers}
    assert output.prompt_logprobs is not None
    found = [row[token].logprob for token, row in zip(ids[1:], output.prompt_logprobs[1:], strict=True) if row]
    assert all(-20 < logprob < 0 for logprob in found)
    assert len(set(found)) > 10


@pytest.mark.parametrize(
    ("scale", "message"), [(255, "up to 254, got 255, which is NaN"), (193, "of at most 2\\^65, got")]
)
def test_scales_that_kernels_do_not_decode_are_named(scale: int, message: str, tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    path, name = tmp_path / "packed" / "model.safetensors", "model.layers.1.mlp.experts.down_proj_scales"
    tensors = load_file(path)
    tensors[name][0, 0, 0] = scale
    save_file(tensors, path)
    with pytest.raises(ValueError, match=f"{name} must hold scales {message}"):
        LLM(tmp_path / "packed", **OPTIONS, skip_tokenizer_init=True, compile_ranges=())


GROUPS, ZEROS, REORDERED = (
    PACKINGS[name] for name in ("compressed-tensors, groups", "gptq, zero points", "gptq, reordered")
)


# Their codes and scales are those that tests of the loader compare, and the op computes with.
READ = pytest.mark.shown_by(
    "models/test_packed_weights.py::test_codes_and_values_are_those_written",
    "passes/test_experts_op.py::test_in_the_interpreter",
)


@pytest.mark.parametrize(
    ("packing", "is_kept"),
    [
        (ZEROS, True),
        (REORDERED, False),
        *(pytest.param(each, True, marks=READ) for each in (PACKINGS["awq"], GROUPS, PACKINGS["gptq, rows"])),
        *(
            pytest.param(PACKINGS[name], True, marks=READ)
            for name in ("compressed-tensors, 8 bits", "gptq, 8 bits, zero points")
        ),
    ],
    ids=lambda each: f"{each.method} {each.bits} {each.columns}" if isinstance(each, Packing) else "",
)
def test_experts_of_other_formats_stay_in_codes(
    packing: Packing, is_kept: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Except those whose columns are reordered. The start tells of those."""
    make_checkpoint(tmp_path / "plain", "qwen3_moe", **MOE)
    oracle = write_packed(tmp_path / "plain", tmp_path / "packed", packing, ["lm_head", *ROUTERS])
    checked = {"verify_passes": True, "strict_passes": is_kept, "compile_ranges": ()}
    assert set(matched(compare(tmp_path / "packed", oracle, IDS, exact=True, **checked))) == {2 * is_kept}
    num_values = MOE["num_experts"] * 3 * MOE["moe_intermediate_size"] * MOE["hidden_size"]
    more = num_values * (32 - packing.bits) // 8
    told = f"2 weights are decoded to float32 while they are loaded, which takes {more:,} bytes more than their codes"
    assert (told in caplog.text) == (not is_kept)


@pytest.mark.shown_by(
    "engine/test_packed_experts.py::test_experts_in_nvfp4_stay_in_codes",
    "engine/test_packed_experts.py::test_ranks_have_parts_of_the_experts_of_gpt_oss",
    "passes/test_quantise_experts.py::test_tiles_end_with_the_share_of_a_rank",
)
@pytest.mark.parametrize("packing", [GROUPS, ZEROS, PACKINGS["awq"]], ids=lambda each: f"{each.method} {each.columns}")
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_have_parts_of_groups_of_experts(packing: Packing, num_ranks: int, tmp_path: Path) -> None:
    """Shares of 192 and of 96 columns, which are no whole groups of 128."""
    sizes = DIVIDED | {"num_hidden_layers": 1, "moe_intermediate_size": 384, "num_key_value_heads": 4}
    make_checkpoint(tmp_path / "plain", "qwen3_moe", **sizes)
    oracle = write_packed(tmp_path / "plain", tmp_path / "packed", packing, ["lm_head", *ROUTERS])
    compare(tmp_path / "packed", oracle, IDS, exact=True, compile_ranges=(), tensor_parallel_size=num_ranks)


# Codes, ranks and the two kinds of code are independent.
ALIKE = pytest.mark.shown_by(
    "engine/test_packed_experts.py::test_experts_in_nvfp4_stay_in_codes",
    "passes/test_quantise_experts.py::test_a_broken_matrix_is_caught",
)


@pytest.mark.parametrize(
    ("form", "model_impl", "num_ranks"),
    [
        (MODELOPT, "transformers", 1),
        (COMPRESSED, "textbook", 2),
        *(pytest.param(*each, marks=ALIKE) for each in ((MODELOPT, "textbook", 1), (COMPRESSED, "transformers", 2))),
    ],
)
def test_experts_in_nvfp4_stay_in_codes(form: str, model_impl: str, num_ranks: int, tmp_path: Path) -> None:
    """Gate and up of an expert have different scales of whole weights. Shares of two ranks, 88 columns, end inside of
    groups of 16."""
    sizes = MOE | {"moe_intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2}
    make_checkpoint(tmp_path / "plain", "qwen3_moe", **sizes)
    oracle = write_nvfp4(tmp_path / "plain", tmp_path / "nvfp4", form, ["lm_head", *ROUTERS])
    options = {"model_impl": model_impl, "tensor_parallel_size": num_ranks, "verify_passes": num_ranks == 1}
    metrics = compare(tmp_path / "nvfp4", oracle, IDS, exact=True, compile_ranges=(), **options)
    assert set(matched(metrics)) == {2}


def test_experts_are_quantised_to_four_bits_while_they_are_loaded(tmp_path: Path) -> None:
    """With the scales of the smallest error, so that what the model computes is near."""
    model = make_checkpoint(tmp_path / "plain", "qwen3_moe", **MOE)
    others = ("lm_head", r"re:.*\.gate$", r"re:.*self_attn.*")
    oracle: Any = model.eval().requires_grad_(False)
    for path in LAYERS:
        experts = oracle.get_submodule(f"{path}.mlp.experts")
        for weight in (experts.gate_up_proj, experts.down_proj):
            weight.copy_(nearest(weight))
    options = {"quantization": "int4", "quantization_ignore": others, "compile_ranges": ()}
    assert set(matched(compare(tmp_path / "plain", oracle, IDS, exact=True, **options))) == {2}


def nearest(weight_ENK: torch.Tensor) -> torch.Tensor:
    """The values of codes in groups of 128 columns, with the best of the scales that are tried."""
    found = torch.zeros_like(weight_ENK)
    for first in range(0, weight_ENK.shape[2], 128):
        part = weight_ENK[:, :, first : first + 128]
        largest = part.abs().amax(2, keepdim=True)
        least = torch.full_like(largest, float("inf"), dtype=torch.float64)
        for candidate in range(20):
            scale = (largest * ((1.075 - 0.025 * candidate) / 7.5)).bfloat16().float()
            values = (part / scale).round().clamp(-8, 7) * scale
            error = (values - part).square().sum(2, keepdim=True, dtype=torch.float64)
            found[:, :, first : first + 128] = torch.where(error < least, values, found[:, :, first : first + 128])
            least = torch.minimum(error, least)
    return found
