"""Mixtures of experts that `compiled-engine quantise` writes: tensors, rules, and what other libraries and the engine
read of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from families import family, write_checkpoint
from quantised_checkpoints import E4M3, LARGEST, LAYOUTS, load_all, write_quantised
from test_quantise_folder import ROUNDED, load, plan_of, quantise
from transformers import AutoModelForCausalLM

from compiled_engine.models.checkpoint.config_reader import DEFAULT_IGNORE
from compiled_engine.models.checkpoint.quantise_folder import EXPERTS, write_folder
from compiled_engine.process.progress import SilentProgress

pytestmark = pytest.mark.usefixtures("one_thread")

# The last tile of a gate has 32 rows, and that of a down projection 32 columns.
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 160,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
TILES = {"fp8": (1, 10**6), "fp8_block": (128, 128)}
OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def decoded(folder: Path, scheme: str) -> dict[str, torch.Tensor]:
    """Return dequantised tensors: an element's scale is its tile's."""
    tensors = load_all(folder)
    rows, columns = TILES[scheme]
    for name, codes in list(tensors.items()):
        if codes.dtype == E4M3:
            scales = tensors.pop(f"{name.removesuffix('.weight')}.weight_scale")
            assert scales.dtype == torch.float32
            assert tuple(scales.shape) == (-(-codes.shape[0] // rows), -(-codes.shape[1] // columns))
            row_N, column_K = (
                torch.arange(size) // tile for size, tile in zip(codes.shape, TILES[scheme], strict=True)
            )
            tensors[name] = codes.float() * scales[row_N[:, None], column_K]
    return tensors


def matrix_of(model: Any, path: str, expert: str, part: str) -> torch.Tensor:
    experts = model.get_submodule(path)
    matrices = experts.down_proj if part == "down" else experts.gate_up_proj.chunk(2, 1)[part == "up"]
    matrix: torch.Tensor = matrices[int(expert)]
    return matrix


@pytest.mark.parametrize("scheme", TILES)
def test_each_matrix_of_an_expert_has_codes_and_scales(scheme: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", "qwen3_moe", **MOE, max_shard_size="1MB")
    done = quantise(tmp_path / "plain", tmp_path / "fp8", "--scheme", scheme, "--json")
    result = json.loads(done.stdout)
    assert result["quantised"] == 2 * (4 + 3 * 4)
    assert result["kept"].keys() == {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"}
    stored, plain = load_all(tmp_path / "fp8"), load_all(tmp_path / "plain")
    assert {name for name, tensor in stored.items() if OF_EXPERT.fullmatch(name) and tensor.dtype == E4M3} == {
        name for name in plain if OF_EXPERT.fullmatch(name)
    }
    section = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert section["ignore"] == list(DEFAULT_IGNORE)
    assert section["config_groups"]["group_0"]["targets"] == ["Linear"]

    values, model = decoded(tmp_path / "fp8", scheme), load(tmp_path / "fp8")
    assert values.keys() == plain.keys()
    for name, weight in plain.items():
        # Codes have three bits of mantissa; those of the smallest values are 2^-9 apart.
        steps = 2.0**-4 * weight.abs() + weight.abs().max() / LARGEST["e4m3"] * 2.0**-10
        assert ((values[name] - weight).abs() <= steps * 1.001).all()
        if match := OF_EXPERT.fullmatch(name):
            assert torch.equal(matrix_of(model, *match.groups()), values[name])


def test_transformers_computes_with_the_values_of_rows(tmp_path: Path) -> None:
    """transformers 5.24 decodes experts with scales of rows, but not with scales of blocks."""
    pytest.importorskip("compressed_tensors", reason="the package compressed-tensors is not installed")
    make_checkpoint(tmp_path / "plain", "qwen3_moe", **MOE)
    assert quantise(tmp_path / "plain", tmp_path / "fp8", "--scheme", "fp8").exit_code == 0
    rows = replace(LAYOUTS[ROUNDED["fp8"]], scale=lambda scales: scales[:, :1])  # in fp32
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
    oracle: Any = write_quantised(tmp_path / "plain", tmp_path / "described", rows, ["lm_head", *routers])
    found: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.float32)
    for name, value in decoded(tmp_path / "fp8", "fp8").items():
        if match := OF_EXPERT.fullmatch(name):
            assert torch.equal(matrix_of(found, *match.groups()), value)
            matrix_of(oracle, *match.groups()).copy_(value)
    ids = torch.arange(3, 130, 2)[None]
    logprobs, expected = (model(ids).logits[0].log_softmax(-1) for model in (found, oracle))
    assert float((expected.exp() * (expected - logprobs)).sum(-1).mean()) < 1e-4


@pytest.mark.parametrize("scheme", TILES)
def test_compressed_tensors_decodes_each_matrix(scheme: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="the package compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    make_checkpoint(tmp_path / "plain", "qwen3_moe", **MOE | {"num_hidden_layers": 1})
    write_folder(plan_of(tmp_path / "plain", scheme), tmp_path / "fp8", SilentProgress())
    section = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    rules = QuantizationConfig.model_validate(section).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(section["format"])
    stored, values = load_all(tmp_path / "fp8"), decoded(tmp_path / "fp8", scheme)
    names = list(filter(OF_EXPERT.fullmatch, values))
    assert len(names) == 12
    for name in names:
        own = {"weight": stored[name], "weight_scale": stored[f"{name.removesuffix('.weight')}.weight_scale"]}
        assert torch.equal(compressor.decompress(own, rules)["weight"].float(), values[name])


def test_some_experts_may_stay(tmp_path: Path) -> None:
    """The folder's list names these; the others are quantised."""
    make_checkpoint(tmp_path / "plain", "qwen3_moe", **MOE)
    of_one = r"re:model\.layers\.1\.mlp\.experts\.2\."
    others = ("--ignore", "lm_head", "--ignore", r"re:.*\.gate$")
    done = quantise(tmp_path / "plain", tmp_path / "fp8", "--scheme", "fp8", "--ignore", of_one, *others)
    assert done.exit_code == 0, done.output
    stored = load_all(tmp_path / "fp8")
    kept = {name for name, tensor in stored.items() if OF_EXPERT.fullmatch(name) and tensor.dtype != E4M3}
    assert kept == {f"model.layers.1.mlp.experts.2.{part}_proj.weight" for part in ("gate", "up", "down")}
    load(tmp_path / "fp8")


def test_no_expert_may_be_quantised(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "plain", "qwen3_moe", **MOE)
    done = quantise(tmp_path / "plain", tmp_path / "fp8", "--scheme", "fp8", "--ignore", EXPERTS)
    assert done.exit_code == 0, done.output
    codes = {name for name, tensor in load_all(tmp_path / "fp8").items() if tensor.dtype == E4M3}
    assert codes
    assert not any(map(OF_EXPERT.fullmatch, codes))
    load(tmp_path / "fp8")


def test_experts_of_transformers_models_are_quantised_under_their_names(tmp_path: Path) -> None:
    """Their matrices have other names, and one parameter in the model."""
    write_checkpoint(tmp_path / "plain", family("mixtral"))
    write_folder(plan_of(tmp_path / "plain"), tmp_path / "fp8", SilentProgress())
    codes = {name for name, tensor in load_all(tmp_path / "fp8").items() if tensor.dtype == E4M3}
    of_experts = {name for name in load_all(tmp_path / "plain") if ".experts." in name}
    assert of_experts
    assert of_experts <= codes
    found, plain = load(tmp_path / "fp8"), load(tmp_path / "plain")
    for name, weight in plain.named_parameters():
        if weight.dim() == 3:
            error = (found.get_parameter(name) - weight).abs()
            assert 0 < error.max() < weight.abs().max() / 16
