"""The arithmetic of lower bounds, on sizes that can be computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compiled_engine.bench import bounds
from compiled_engine.bench.bounds import (
    AttentionSizes,
    Chunk,
    Job,
    ModelSizes,
    Rates,
    model_sizes,
    prefill_seconds,
    step_bytes,
    step_flops,
    step_seconds,
    tpot_seconds,
    workload_seconds,
)
from compiled_engine.bench.shapes import write_shape
from compiled_engine.models.checkpoint.build_model import build_model
from compiled_engine.models.checkpoint.config_reader import read_model_config
from compiled_engine.resolve.recurrences import resolve_states


def attention_of(*windows: int | None) -> tuple[AttentionSizes, ...]:
    return tuple(AttentionSizes(window, kv_bytes=4, flops=8) for window in windows)


SIZES = ModelSizes(weight_bytes=1000, linear_params=100, head_params=10, attention=attention_of(None, None))
RATES = Rates(bytes_per_s=1e3, flops_per_s=1e6, source="by hand")


def test_a_step_reads_weights_once_and_each_context_in_every_layer() -> None:
    assert step_bytes(SIZES, [Chunk(0, 5)]) == 1000
    assert step_bytes(SIZES, [Chunk(3, 1), Chunk(7, 1)]) == 1000 + 2 * (3 + 7) * 4


def test_a_step_multiplies_each_token_and_each_query_with_its_keys() -> None:
    # The third token of a request sees three keys.
    assert step_flops(SIZES, [Chunk(2, 1)]) == 2 * (100 + 10) + 2 * 3 * 8
    assert step_flops(SIZES, [Chunk(0, 4, samples=False)]) == 2 * 400 + 2 * (1 + 2 + 3 + 4) * 8


def test_a_window_limits_what_is_read_and_multiplied() -> None:
    sizes = ModelSizes(1000, 100, 10, attention_of(None, 3))
    # Of the three keys that a query sees one is its own.
    assert step_bytes(sizes, [Chunk(10, 1)]) == 1000 + (10 + 2) * 4
    assert step_flops(sizes, [Chunk(0, 5)]) == 2 * (500 + 10) + (15 + 1 + 2 + 3 + 3 + 3) * 8
    assert step_flops(sizes, [Chunk(10, 2)]) == 2 * (200 + 10) + (11 + 12 + 3 + 3) * 8


def test_layers_read_and_multiply_the_keys_of_their_own_heads(tmp_path: Path) -> None:
    wide = {"head_dim": 32, "global_head_dim": 64, "num_key_value_heads": 4, "num_global_key_value_heads": 1}
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "sliding_window": 16}
    config = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", **wide, **sizes, **kinds}
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_k_eq_v": True}))
    model, _ = read_model_config(
        tmp_path, dtype="bfloat16", max_model_len=4096, load_format="dummy", seed=0, device_type="cuda"
    )
    assert model_sizes(model).attention == ((16, 2 * 4 * 32 * 2, 4 * 8 * 32), (None, 2 * 64 * 2, 4 * 8 * 64))


def test_latent_rows_are_read_and_keys_and_values_made_from_them_are_multiplied(tmp_path: Path) -> None:
    row = {"kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    config = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", **row, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "first_k_dense_replace": 1}))
    model, _ = read_model_config(
        tmp_path, dtype="bfloat16", max_model_len=2048, load_format="dummy", seed=0, device_type="cuda"
    )
    assert model_sizes(model).attention == ((None, (24 + 8) * 2, 2 * 4 * (16 + 8 + 12)),)


def test_the_slower_of_reading_and_multiplying_decides() -> None:
    assert step_seconds(SIZES, RATES, [Chunk(0, 1)]) == 1.0
    many = [Chunk(0, 10_000)]
    assert step_seconds(SIZES, RATES, many) == step_flops(SIZES, many) / 1e6


def test_tpot_takes_the_mean_context_of_all_decodes() -> None:
    # Tokens 2, 3 and 4 of the output see 10, 11 and 12 earlier ones.
    mean = sum(step_seconds(SIZES, RATES, [Chunk(context, 1)] * 2) for context in (10, 11, 12)) / 3
    assert tpot_seconds(SIZES, RATES, batch_size=2, prompt_len=10, output_len=4) == pytest.approx(mean)


@pytest.mark.parametrize("bytes_per_s", [1e3, 1e9], ids=["reading", "multiplying"])
@pytest.mark.parametrize("window", [1, 5, 9, 12, 15, 16, 40])
def test_a_window_that_decodes_grow_beyond_limits_each_of_them(window: int, bytes_per_s: float) -> None:
    sizes = ModelSizes(1000, 100, 10, attention_of(None, window, window))
    rates = Rates(bytes_per_s, 1e6, "by hand")
    decodes = [step_seconds(sizes, rates, [Chunk(context, 1)] * 2) for context in range(10, 16)]
    assert tpot_seconds(sizes, rates, batch_size=2, prompt_len=10, output_len=7) == pytest.approx(sum(decodes) / 6)
    found = workload_seconds(sizes, rates, [Job(10, [7]), Job(10, [7])], max_num_seqs=2)
    assert found == pytest.approx(prefill_seconds(sizes, rates, [10, 10]) + sum(decodes))


def test_a_workload_is_its_prompts_and_then_its_decodes() -> None:
    jobs = [Job(5, [3]), Job(9, [2])]
    decodes = step_bytes(SIZES, [Chunk(5, 1), Chunk(9, 1)]) + step_bytes(SIZES, [Chunk(6, 1)])
    expected = prefill_seconds(SIZES, RATES, [5, 9]) + decodes / 1e3
    assert workload_seconds(SIZES, RATES, jobs, max_num_seqs=8) == pytest.approx(expected)
    one_by_one = workload_seconds(SIZES, RATES, jobs, max_num_seqs=1)
    assert one_by_one == pytest.approx(expected + 1.0)


def test_what_requests_have_in_common_is_computed_once_and_read_once_a_step() -> None:
    # Seven tokens of all prompts, then two requests of 5 + 3 and 5 + 2: steps of two decodes and of one.
    found = workload_seconds(SIZES, RATES, [Job(5, [3]), Job(5, [2])], max_num_seqs=8, common=7)
    own = 2 * 4 * (5 + 6 + 5)
    assert found == pytest.approx((1000 + 2 * (1000 + 2 * 4 * 7) + own) / 1e3)
    # A prompt of two completions likewise: 3 steps of the one, 1 of the other.
    found = workload_seconds(SIZES, RATES, [Job(5, [4, 2])], max_num_seqs=8)
    assert found == pytest.approx((1000 + 3 * (1000 + 2 * 4 * 5) + 2 * 4 * (0 + 1 + 2 + 0)) / 1e3)
    # A window may have left it behind.
    sizes = ModelSizes(1000, 100, 10, attention_of(None, 3))
    found = workload_seconds(sizes, RATES, [Job(5, [3, 3])], max_num_seqs=8)
    assert found == pytest.approx((1000 + 2 * (1000 + 4 * 5) + 2 * 2 * 4 * (0 + 1)) / 1e3)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    sizes = ModelSizes(1000, 100, 10, attention_of(None), expert_bytes=100, num_experts=8, experts_per_token=2)
    assert step_bytes(sizes, [Chunk(0, 1)]) == 1000 + 2 * 100
    # Of a second token's two experts a quarter has been chosen before, if all are equally likely.
    assert step_bytes(sizes, [Chunk(0, 1), Chunk(0, 1)]) == pytest.approx(1000 + (2 + 2 * 6 / 8) * 100)
    assert step_bytes(sizes, [Chunk(0, 1000)]) == pytest.approx(1000 + 8 * 100)


def test_the_bounds_of_a_shape_with_experts(tmp_path: Path) -> None:
    config, _ = read_model_config(
        write_shape(tmp_path, "qwen3-30b-a3b"),
        dtype="bfloat16",
        max_model_len=4096,
        load_format="dummy",
        seed=0,
        device_type="cuda",
    )
    sizes = model_sizes(config)
    assert sizes.expert_bytes * sizes.num_experts == 48 * 128 * 3 * 768 * 2048 * 2
    assert sizes.linear_params == 48 * 2048 * (4096 + 2 * 512 + 4096 + 128 + 8 * 3 * 768)


@pytest.mark.parametrize(
    ("shape", "quantization", "expert_bytes"),
    [
        ("gpt-oss-20b-mxfp4", None, 24 * 32 * (3 * 2880 * 2880 * 17 // 32 + 3 * 2880 * 2)),
        ("qwen3-30b-a3b-nvfp4", None, 48 * 128 * (3 * 768 * 2048 * 9 // 16 + 4 * (2 * 768 + 2048))),
        ("qwen3-30b-a3b", "int4", 48 * 128 * 3 * 768 * 2048 * 17 // 32),
        ("qwen3-30b-a3b", "fp8_block", 48 * 128 * 3 * (768 * 2048 + 6 * 16 * 4)),
    ],
)
def test_the_bounds_of_a_quantised_shape(
    shape: str, quantization: str | None, expert_bytes: int, tmp_path: Path
) -> None:
    """Codes and scales are read, and the biases of experts."""
    options = {"max_model_len": 4096, "load_format": "dummy", "seed": 0, "device_type": "cuda"}
    config, _ = read_model_config(
        write_shape(tmp_path, shape),
        dtype="bfloat16",
        quantization=quantization,
        **options,  # type: ignore[arg-type]
    )
    sizes = model_sizes(config)
    assert sizes.expert_bytes * sizes.num_experts == expert_bytes
    head = config.vocab_size * config.hidden_size
    assert sizes.weight_bytes > 2 * head
    if quantization is not None:  # linears take less, the head and the norms as much as before
        plain = model_sizes(replace(config, quantisation=None))
        assert 2 * head < sizes.weight_bytes < plain.weight_bytes
        assert sizes.linear_params == plain.linear_params


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(
    ("shape", "layers", "billions", "state_mib"),
    [("qwen3.6-27b", 16, 26.9, 146.8), ("qwen3.6-35b-a3b", 10, 34.7, 61.4), ("lfm2-1.2b", 6, 1.17, 0.078125)],
)
def test_the_bounds_of_hybrid_shapes(
    shape: str, layers: int, billions: float, state_mib: float, tmp_path: Path
) -> None:
    config, _ = read_model_config(
        write_shape(tmp_path, shape),
        dtype="bfloat16",
        max_model_len=4096,
        load_format="dummy",
        seed=0,
        device_type="cuda",
    )
    sizes = model_sizes(config)
    assert [layer.window for layer in sizes.attention] == [None] * layers
    parameters = sum(parameter.numel() for parameter in build_model(config).parameters())
    assert round(parameters / 1e9, 1 if billions > 2 else 2) == billions
    assert sizes.state_bytes / 2**20 == pytest.approx(state_mib, rel=0.01)
    assert model_sizes(resolve_states(config, 3)) == sizes  # what drafts add is no part of the least that a step reads
    decode, first = step_bytes(sizes, [Chunk(1, 1)]), step_bytes(sizes, [Chunk(0, 1)])
    assert decode - first == sizes.state_bytes + sum(layer.kv_bytes for layer in sizes.attention)
    if "moe" in config.architecture.lower():
        assert (sizes.num_experts, sizes.experts_per_token) == (256, 8)
        assert sizes.expert_bytes == 40 * 3 * 512 * 2048 * 2


def test_rates_are_measured_where_they_are_not_known() -> None:
    rates = bounds.measured_rates(torch.device("cpu"), torch.float32)
    assert rates.bytes_per_s > 0
    assert rates.flops_per_s > 0
    assert rates.source == "measured: a copy of 256 MiB, a product of 1024 x 1024 in float32"


@pytest.mark.parametrize(
    ("name", "known"), [("NVIDIA H200", True), ("NVIDIA GH200 480GB", False), ("NVIDIA H200 MIG 1g.18gb", False)]
)
def test_rates_are_known_for_the_whole_of_a_device(name: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(bounds, "measured_rates", lambda device, dtype: RATES)
    found = bounds.device_rates(torch.device("cuda"), torch.bfloat16)
    assert (found.source == "known for H200") == known
    assert (found == RATES) != known
