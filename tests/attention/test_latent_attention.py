"""Attention over a cache of latent rows, by every backend that has it, against its definition in float64."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import triton
from hopper_compilation import compiled_for_hopper, registers, stack_bytes
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret
from latent_cases import CASES, LatentCase, mistake

from compiled_engine.attention.backend import choose_backend, get_backend
from compiled_engine.attention.backends.triton_backend import MIN_SHARED_MEMORY
from compiled_engine.attention.backends.triton_latents import (
    attend_latents_kernel,
    combine_latents_kernel,
    latent_splits,
    latent_tiles,
    write_latents_kernel,
)
from compiled_engine.attention.case import KVFormat, Refused

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ASKED = LatentCase("", ((0, 1),)).asked("cpu", torch.float32)


def mistakes(backend: str, device: str) -> dict[str, str]:
    runs = {f"{case.name} {dtype}": mistake(backend, case, device, dtype) for case in CASES for dtype in DTYPES}
    return {name: wrong for name, wrong in runs.items() if wrong}


def test_plain_torch_on_a_cpu() -> None:
    assert mistakes("torch", "cpu") == {}


@loops_to_a_loaded_bound
def test_the_triton_kernels_in_the_interpreter() -> None:
    ran = interpret(__file__, "-c", "import interpreter, latent_cases; latent_cases.main('triton')")
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert json.loads(ran.stdout) == {}


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_on_a_gpu(backend: str) -> None:
    assert mistakes(backend, "cuda") == {}


def test_backends_without_such_a_kernel_refuse() -> None:
    with pytest.raises(Refused, match="latent_dim is 24; allowed: 0"):
        get_backend("cpp").accept(ASKED)
    assert choose_backend("auto", "auto", [ASKED]).backend == "torch"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache": KVFormat(torch.uint8, 16)}, "kv_cache_dtype is torch.uint8; allowed: torch.float32 with latent r.*"),
        ({"sliding_window": 8}, "sliding_window is 8; allowed: 0 with latent rows"),
        ({"soft_cap": 5.0}, "soft_cap is 5.0; allowed: 0 with latent rows"),
        ({"sinks": True}, "sinks is True; allowed: False with latent rows"),
        ({"num_kv_heads": 2}, "num_kv_heads is 2; allowed: 1 with latent rows"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_cases_without_a_kernel_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(Refused, match=f"^{message}$"):
        get_backend("torch").accept(replace(ASKED, **changes))  # type: ignore[arg-type]


def test_partial_results_take_little_memory() -> None:
    like = torch.empty(1)
    few, many = (latent_splits(count, 128, 512, 131_072, like).count for count in (1, 256))
    assert few > many == 2  # 256 requests of 128 heads: 64 MiB for each split


DRAWN = pytest.mark.product(one_in=1000)


# Elements, heads of a rank, latent, rotated part: of DeepSeek-V3 on eight ranks and on one, and of MiniCPM3.
@pytest.mark.parametrize(
    ("element", "num_heads", "latent", "rotated"),
    [
        ("bf16", 16, 512, 64),
        *(pytest.param(*each, marks=DRAWN) for each in (("bf16", 128, 512, 64), ("bf16", 40, 256, 32))),
        *(pytest.param("fp32", *each, marks=DRAWN) for each in ((16, 512, 64), (128, 512, 64))),
    ],
)
def test_kernels_compile_for_hopper(element: str, num_heads: int, latent: int, rotated: int) -> None:
    """Tiles fit into the registers, and into the shared memory of every supported GPU."""
    width, tiles = latent + rotated, latent_tiles(num_heads, 2 if element == "bf16" else 4)
    constants = {
        "Q_HEAD_STRIDE": width,
        "OUT_HEAD_STRIDE": latent,
        "NUM_HEADS": num_heads,
        "BLOCK_SIZE": 16,
        "LATENT": latent,
        "WIDTH": width,
        "TILE_M": tiles.rows,
        "TILE_N": tiles.keys,
        "TILE_R": triton.next_power_of_2(latent),
        "TILE_P": triton.next_power_of_2(rotated),
        "TILE_W": triton.next_power_of_2(width),
        "TILE_S": 8,
        "GRAIN": 32,
    }
    types = dict.fromkeys(("query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr"), "*i32")
    types |= dict.fromkeys(("partial_ptr", "partial_max_ptr", "partial_sum_ptr"), "*fp32")
    types |= {"slot_mapping_ptr": "*i64", "scale_log2": "fp32"}
    for kernel, options in (
        (write_latents_kernel, {"num_warps": 2}),
        (combine_latents_kernel, {"num_warps": 4}),
        (attend_latents_kernel, {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}),
    ):
        program = compiled_for_hopper(kernel, constants, types, pointers=f"*{element}", **options)
        assert program.metadata.shared <= MIN_SHARED_MEMORY
        assert stack_bytes(program) == 0
        assert registers(program) * 32 * options["num_warps"] <= 1 << 16
