"""Experts of codes through the whole engine: read from a checkpoint, and made while one is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from packed_checkpoints import OF_EXPERT, matrix_of
from quantised_checkpoints import LAYOUTS, Layout, compressed, load_all, write_quantised
from safetensors.torch import save_file
from test_quantised_engine import IDS, compare

from compiled_engine.passes.framework.rounding import codes_of, decode, scales_of
from compiled_engine.quantisation import Rounding

# Tiles end inside the rows of a projection, and with the last column or before it.
MOE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 160,
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
}
LAYERS = [f"model.layers.{layer}" for layer in range(MOE["num_hidden_layers"])]
ROUTERS = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
# Of linears, inputs are rounded in neither.
ALONE = "compressed-tensors, channel, weights alone"


def write_experts(
    source: Path,
    folder: Path,
    layout: Layout,
    text: str | dict[str, str],
    linears: bool = True,
    ignored: list[str] = ROUTERS,
) -> Any:
    """write_quantised, with the matrices of experts in a Rounding, or in one for each of gate, up and down; linears:
    others are quantised as well. ignored: names of modules that are not, as the checkpoint has them."""
    others = [] if linears else [f"{path}.self_attn.{part}_proj" for path in LAYERS for part in "qkvo"]
    model = write_quantised(source, folder, layout, ["lm_head", *ignored, *others], round_inputs=False)
    tensors = load_all(folder)
    for name, weight in list(tensors.items()):
        match = OF_EXPERT.fullmatch(name)
        if match is None or name.removesuffix(".weight") in ignored:
            continue
        path, expert, part = match.groups()
        rounding = Rounding.parse(text if isinstance(text, str) else text[part])
        scales = scales_of(weight, rounding)
        codes = codes_of(weight, scales, rounding)
        tensors |= {name: codes, f"{name.removesuffix('.weight')}.{layout.scale_name}": scales}
        matrix_of(model, path, int(expert), part).copy_(decode(codes, scales, rounding))
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    return model


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(
    ("layout", "text"), [(ALONE, "e4m3 1x*"), ("compressed-tensors, block", "e4m3 128x128")], ids=["rows", "blocks"]
)
def test_codes_of_experts_are_multiplied_as_they_are(layout: str, text: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", "qwen3_moe", **MOE)
    chosen = LAYOUTS[layout]
    if chosen.inputs is not None:  # linears' inputs are not rounded, so that the oracle is exact
        chosen = replace(chosen, config=compressed("block", None, block_structure=[128, 128]), inputs=None)
    oracle = write_experts(tmp_path / "plain", tmp_path / "fp8", chosen, text)
    passes = compare(tmp_path / "fp8", oracle, IDS, exact=True, verify_passes=True)["passes"]
    found = [each["quantise_experts"] for name, each in passes.items() if not name.startswith("logits")]
    assert found
    assert all(each == {"matches": 2, "contract": 2} for each in found)


# Blocks end with no rank's 96 rows or columns. Inputs of linears are not rounded, so that the oracle is exact.
DIVIDED = MOE | {
    "num_hidden_layers": 2,
    "moe_intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 132,
}


@pytest.mark.shown_by(
    "passes/test_quantise_experts.py::test_every_pass_keeps_its_contract_and_its_verifier",
    "passes/test_quantise_experts.py::test_tiles_end_with_the_share_of_a_rank",
    "models/test_experts_shards.py::test_each_rank_has_its_part_of_the_values",
    "engine/test_quantised_engine.py::test_two_ranks_off_the_borders_of_blocks",
)
@pytest.mark.parametrize(
    "ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}], ids=str
)
def test_ranks_compute_with_the_same_codes(ranks: dict[str, int], tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", "qwen3_moe", **DIVIDED)
    block = LAYOUTS["compressed-tensors, block"]
    alone = replace(block, config=compressed("block", None, block_structure=[128, 128]), inputs=None)
    oracle = write_experts(tmp_path / "plain", tmp_path / "fp8", alone, "e4m3 128x128")
    compare(tmp_path / "fp8", oracle, IDS, exact=True, **ranks)


ALL_BUT_EXPERTS = ("lm_head", r"re:.*\.gate$", r"re:.*self_attn.*")


# One is drawn: each has its matrices verified in passes/test_quantise_experts.py.
@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("quantization", ["fp8", "fp8_block"])
def test_experts_are_quantised_while_they_are_loaded(quantization: str, tmp_path: Path) -> None:
    """They compute what the codes stand for: alone, since other linears round their inputs."""
    make_checkpoint(tmp_path / "plain", "qwen3_moe", **MOE)
    # The 160 rows of a gate are whole tiles of 32.
    tiles = {"gate_proj": "e4m3 32x128", "up_proj": "e4m3 32x128", "down_proj": "e4m3 128x128"}
    oracle = write_experts(
        tmp_path / "plain",
        tmp_path / "fp8",
        LAYOUTS[ALONE],
        tiles if quantization == "fp8_block" else "e4m3 1x*",
        False,
    )
    online = {"quantization": quantization, "quantization_ignore": ALL_BUT_EXPERTS}
    compare(tmp_path / "plain", oracle, IDS, exact=True, verify_passes=True, **online)
