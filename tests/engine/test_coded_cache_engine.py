"""Engines whose KV cache has 8 bits: all ways of running them give the same tokens, and checkpoints have scales."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_engines import PROMPTS

from compiled_engine.kv_format import LEAST_SCALE
from compiled_engine.llm import LLM
from compiled_engine.models.checkpoint.kv_scales import find_kv_scales, kv_scales_of
from compiled_engine.passes.framework.parameter import KV_SCALES, Parameter
from compiled_engine.sampling.params import SamplingParams

OPTIONS: dict[str, Any] = {"device": "cpu", "progress": False, "max_model_len": 96, "block_size": 16}
# Recorded work and several ranks know nothing of the cache's form.
SHOWN = pytest.mark.shown_by(
    "engine/test_coded_cache_engine.py::test_fp8_takes_the_scales_of_a_checkpoint",
    "engine/test_poisoned_engines.py::test_requests_together_get_the_tokens_of_each_alone",
)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)


def tokens_of(prompts: list[str], repeats: int = 1, **options: Any) -> list[list[int]]:
    with LLM(**OPTIONS | options) as llm:
        for _ in range(repeats):
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """By the reference, in one step for each prompt."""
    return tokens_of(PROMPTS, mode="eager", attention_backend="torch", kv_cache_dtype="int8")


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "eager", "max_num_batched_tokens": 8, "max_num_seqs": 4, "num_blocks": 8},
        {"mode": "eager", "repeats": 2},
        {"mode": "compiled", "strict_passes": True, "compile_ranges": ()},
        pytest.param({"mode": "compiled", "tensor_parallel_size": 2, "compile_ranges": ()}, marks=SHOWN),
        pytest.param({"mode": "graphed", "verify_passes": True}, marks=SHOWN),
    ],
    ids=["chunks and preemption", "prefix cache", "compiled", "two ranks", "recorded"],
)
def test_int8_gives_the_same_tokens_however_it_runs(options: dict[str, Any], expected: list[list[int]]) -> None:
    assert tokens_of(PROMPTS, kv_cache_dtype="int8", **options) == expected


def with_scales(bundled: Path, folder: Path, k_name: str, v_name: str) -> None:
    """Write the bundled model with scales of keys and values."""
    shutil.copytree(bundled, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    layers = {int(name.split(".")[2]) for name in tensors if name.startswith("model.layers.")}
    for layer in layers:
        tensors[f"model.layers.{layer}.self_attn.{k_name}"] = torch.tensor([2.0 ** -(2 + layer % 2)])
        tensors[f"model.layers.{layer}.self_attn.{v_name}"] = torch.tensor(2.0**-4)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": scheme,
    }
    (folder / "config.json").write_text(json.dumps(config))


def test_fp8_takes_the_scales_of_a_checkpoint(
    bundled_model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Powers of two scale e4m3 exactly, so they change no token where nothing is subnormal or saturates. Without any
    in the checkpoint a warning says so."""
    with_scales(bundled_model_path, tmp_path / "scaled", "k_scale", "v_scale")
    shutil.copytree(tmp_path / "scaled", tmp_path / "unscaled")  # of the same scheme, so that it is compiled once
    shutil.copy(bundled_model_path / "model.safetensors", tmp_path / "unscaled")
    options = {"mode": "compiled", "compile_ranges": (), "kv_cache_dtype": "fp8", "strict_passes": True}
    with caplog.at_level(logging.WARNING, logger="compiled_engine"):
        scaled = tokens_of(PROMPTS, model=tmp_path / "scaled", **options)
        assert "k_scale" not in caplog.text
        unscaled = tokens_of(PROMPTS, model=tmp_path / "unscaled", **options)
    assert "has no k_scale and v_scale for an FP8 KV cache: 1.0 is used" in caplog.text
    same = sum(a == b for ours, theirs in zip(scaled, unscaled, strict=True) for a, b in zip(ours, theirs, strict=True))
    assert same >= 0.9 * sum(map(len, scaled))


LEAF = Parameter("attention.3.kv_scales", (2, 2), "float32", KV_SCALES)


@pytest.mark.parametrize(
    ("k_name", "v_name"),
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ],
)
def test_spellings_of_scales(k_name: str, v_name: str) -> None:
    tensors = {
        f"model.layers.3.{k_name}": torch.tensor([0.5]),
        f"model.layers.3.{v_name}": torch.tensor(0.25, dtype=torch.bfloat16),
        "model.layers.3.self_attn.k_proj.weight_scale": torch.tensor([7.0]),
        "model.layers.3.self_attn.q_scale": torch.tensor([7.0]),
    }
    names = find_kv_scales(tensors)
    assert len(names) == 2
    assert kv_scales_of(LEAF, tensors, names, 2, 0, 1).tolist() == [[0.5, 0.5], [0.25, 0.25]]
    other = Parameter("attention.2.kv_scales", (2, 2), "float32", KV_SCALES)
    assert kv_scales_of(other, tensors, names, 2, 0, 1).tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_each_rank_takes_the_scales_of_its_heads() -> None:
    tensors = {"model.layers.3.self_attn.k_scale": torch.arange(1.0, 5.0).view(4, 1, 1)}
    names = find_kv_scales(tensors)
    found = [kv_scales_of(LEAF, tensors, names, 4, rank, 2)[0].tolist() for rank in range(2)]
    assert found == [[1.0, 2.0], [3.0, 4.0]]


def test_scales_of_heads_without_values_are_what_kernels_can_divide_by() -> None:
    tensors = {"model.layers.3.self_attn.k_scale": torch.tensor([1e-30, 0.5])}
    tensors["model.layers.3.self_attn.v_scale"] = torch.tensor(1e-20)
    found = kv_scales_of(LEAF, tensors, find_kv_scales(tensors), 2, 0, 1)
    assert found.tolist() == [[LEAST_SCALE, 0.5], [LEAST_SCALE, LEAST_SCALE]]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([1.0, 2.0, 3.0], "has 3 values; allowed: 1, or one for each of 2 heads"),
        ([0.0], "allowed: finite numbers above 0"),
    ],
)
def test_wrong_scales_are_one_line(value: list[float], reason: str) -> None:
    tensors = {"model.layers.3.self_attn.k_scale": torch.tensor(value)}
    with pytest.raises(ValueError, match=reason):
        kv_scales_of(LEAF, tensors, find_kv_scales(tensors), 2, 0, 1)
