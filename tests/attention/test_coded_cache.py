"""KV caches of 8 bits: rounding, the layout of a block, its bytes, and backends on the table of attention cases."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from attention_cases import (
    CASES,
    CODED_CASES,
    SOME_CODED_CASES,
    Case,
    decodes,
    depends_on_garbage,
    outcome,
    refusal,
    same_cache,
)
from attention_cases import build as build_batch
from test_attention import LIMITS

from compiled_engine.attention.backends.torch_backend import write_kv_without_waiting
from compiled_engine.attention.case import AttentionCase, KVFormat
from compiled_engine.attention.kv_codes import decode, encode, kernels_convert, planes
from compiled_engine.engine.cache_memory import block_bytes, size_cache
from compiled_engine.kv_format import CODED, FP8, FP8_LARGEST, INT8, cache_dtype, head_dim_of
from compiled_engine.options import EngineOptions
from compiled_engine.resolve.engine import resolve

BYTES = torch.uint8
E4M3 = torch.float8_e4m3fn


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Heads of very different sizes, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-6, 4, math.prod(shape[:-1])).view(*shape[:-1], 1)
    heads = torch.randn(shape, generator=generator) * sizes
    heads.view(-1, shape[-1])[0] = 0
    return heads


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
def test_torch_converts_e4m3_for_gpus_that_cannot(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 8.9, no kernel may read or write an FP8 cache; other caches, all GPUs convert."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    converts = kernels_convert.__wrapped__
    gpu = torch.device("cuda", 0)
    assert converts(E4M3, gpu) == (capability >= (8, 9))
    assert all(converts(dtype, gpu) for dtype in (BYTES, torch.bfloat16, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_int8_is_off_by_half_a_step_of_each_head(dtype: torch.dtype) -> None:
    x_TKd = values(40, 3, 64).to(dtype)
    codes_TKd, scales_TK = encode(x_TKd, BYTES, None)
    x_TKd = x_TKd.float()
    assert codes_TKd.min() >= 1
    assert not decode(codes_TKd, scales_TK, BYTES)[0, 0].any()
    step_TK1 = x_TKd.abs().amax(-1, keepdim=True) / 127
    error_TKd = (decode(codes_TKd, scales_TK, BYTES) - x_TKd).abs()
    assert bool((error_TKd <= 0.505 * step_TK1 + 1e-12).all())
    assert bool((error_TKd.amax(-1, keepdim=True) > 0.3 * step_TK1)[x_TKd.any(-1)].all())


def test_fp8_is_the_nearest_e4m3_of_the_scaled_value_and_saturates() -> None:
    x_TKd = values(40, 3, 64)
    scale_K = torch.tensor([0.25, 1.0, 8.0])
    (codes_TKd,) = encode(x_TKd, E4M3, scale_K)
    read_TKd = decode(codes_TKd, scale_K, E4M3)
    assert bool(read_TKd.isfinite().all())
    most_1K1 = FP8_LARGEST * scale_K.view(1, -1, 1)
    inside = x_TKd.abs() <= most_1K1
    assert torch.equal(read_TKd[~inside], (most_1K1 * x_TKd.sign())[~inside])
    error_TKd = (read_TKd - x_TKd).abs()
    assert bool((error_TKd <= torch.maximum(x_TKd.abs() / 16, scale_K.view(1, -1, 1) / 1024))[inside].all())
    assert torch.equal(encode(x_TKd, E4M3, None)[0], encode(x_TKd, E4M3, torch.ones(3))[0])


@pytest.mark.parametrize("elements", CODED, ids=lambda elements: elements.name)
def test_planes_cover_each_byte_of_a_block_once(elements: Any) -> None:
    """Halves are aligned to 16 bytes, and scales come behind the codes of their half."""
    batch = build_batch(Case("", decodes(20), head_dim=24, storage=elements.name))
    cache_N2PKd = batch.kv_cache_N2PKd
    assert head_dim_of(cache_N2PKd) == 24
    assert cache_N2PKd.is_contiguous()
    cache_N2PKd.view(torch.uint8).zero_()
    for plane in planes(cache_N2PKd):
        assert plane.data_ptr() % 16 == 0
        assert plane.stride(0) * plane.element_size() % 16 == 0
        bytes_of_plane = plane if plane.dtype is torch.uint8 else plane.view(torch.int16)
        bytes_of_plane += 1 if plane.dtype is torch.uint8 else 0x0101
    assert bool((cache_N2PKd.view(torch.uint8) == 1).all())


@pytest.mark.parametrize(("backend", "dtype"), [*product(["torch", "cpp"], [torch.float32, torch.bfloat16])], ids=str)
def test_on_a_cpu(backend: str, dtype: torch.dtype, pytestconfig: pytest.Config) -> None:
    """The table of attention cases over caches of 8 bits, of which unused blocks and slots hold NaN."""
    cases = CODED_CASES if pytestconfig.getoption("--all") else SOME_CODED_CASES
    limits = LIMITS[backend]
    expected = {
        case.name: f"refused: {limits[name]}" if (name := case.name.split(": ", 1)[1]) in limits else "right"
        for case in cases
    }
    assert {case.name: outcome(backend, case, "cpu", dtype) for case in cases} == expected


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize("elements", CODED, ids=lambda elements: elements.name)
def test_garbage_does_not_matter_on_a_cpu(backend: str, elements: Any) -> None:
    for case in CASES:
        if case.name in ("decodes with padding rows", "mixed", "window, decodes"):
            assert not depends_on_garbage(backend, replace(case, storage=elements.name))


@pytest.mark.parametrize("elements", CODED, ids=lambda elements: elements.name)
def test_both_ways_of_writing_agree(elements: Any) -> None:
    """The one that never asks the device for the slots writes the same, also when there is nothing to write."""
    batch = build_batch(Case("", (*decodes(20, 33), *decodes(0)), storage=elements.name))
    scales_2K, slots_T = batch.scoring.kv_scales_2K, batch.inputs.slot_mapping_T
    write_kv_without_waiting(batch.k_TKd, batch.v_TKd, batch.kv_cache_N2PKd, slots_T, scales_2K)
    assert same_cache(batch.kv_cache_N2PKd, batch.expected_cache_N2PKd)
    nothing_T = torch.full_like(slots_T, -1)
    write_kv_without_waiting(batch.k_TKd * 2, batch.v_TKd * 2, batch.kv_cache_N2PKd, nothing_T, scales_2K)
    assert same_cache(batch.kv_cache_N2PKd, batch.expected_cache_N2PKd)


def test_flash_attn_refuses_with_its_reason() -> None:
    pytest.importorskip("flash_attn")
    case = AttentionCase("cuda", torch.bfloat16, 4, 2, 64, KVFormat(BYTES, 256))
    assert "flash-attn reads no codes" in str(refusal("flash_attn", case))


@pytest.mark.parametrize(
    ("given", "kept", "bytes_per_head"), [("auto", "auto", 256), ("int8", INT8, 66), ("fp8", FP8, 64)]
)
def test_the_option_reaches_the_cache(given: str, kept: str, bytes_per_head: int) -> None:
    config = resolve(EngineOptions(device="cpu", mode="compiled", kv_cache_dtype=given, max_model_len=64))
    model = config.model
    assert config.cache.kv_dtype == kept
    assert model.head_dim == 64
    assert block_bytes(config) == 2 * 16 * model.num_layers * model.num_kv_heads * bytes_per_head
    assert ("cache.kv_dtype" in config.reasons) == (given == "auto")
    assert size_cache(config, 0, 0, 0).block_bytes == block_bytes(config)


def test_fp8_in_eager_mode_is_one_line() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype is 'fp8', but the mode is eager, which reads no scales"):
        resolve(EngineOptions(device="cpu", mode="eager", kv_cache_dtype="fp8"))


def test_a_wrong_format_is_one_line() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype is 'fp8_e5m2'; allowed: auto, int8, int8_per_token_head, fp8"):
        EngineOptions(kv_cache_dtype="fp8_e5m2")


def test_as_many_blocks_as_promised() -> None:
    """At head size 128 int8 with scales of 16 bits has 1.96 times the blocks of a cache of 16 bits."""
    config = resolve(EngineOptions(device="cpu", mode="eager", dtype="bfloat16", max_model_len=64))
    model = replace(config.model, head_dim=128)
    sizes = {
        name: block_bytes(replace(config, model=model, cache=replace(config.cache, kv_dtype=name)))
        for name in ("auto", INT8, FP8)
    }
    assert sizes["auto"] / sizes[INT8] > 1.96
    assert sizes["auto"] / sizes[FP8] == 2
    assert cache_dtype(INT8, torch.bfloat16) is BYTES
