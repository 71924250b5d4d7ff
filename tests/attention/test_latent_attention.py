"""Attention over a cache of latent rows, by every backend that has it, against its definition in float64."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from hopper_compilation import compiled_for_hopper, registers, stack_bytes
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret
from latent_cases import CASES, CODED_CASES, DECODES, LatentCase, mistake, random_case

from compiled_engine.attention.backend import choose_backend, get_backend
from compiled_engine.attention.backends import latent_step
from compiled_engine.attention.backends.triton_backend import MIN_SHARED_MEMORY
from compiled_engine.attention.backends.triton_expansion import (
    Workspace,
    attend_expanded_kernel,
    expand_rows_kernel,
    expanded_tiles,
    place_kernel,
    tile_of,
)
from compiled_engine.attention.backends.triton_latent_rows import write_latents_kernel
from compiled_engine.attention.backends.triton_latents import (
    MOST_ROTATED_OF_LARGE,
    attend_latents_kernel,
    combine_latents_kernel,
    latent_splits,
    latent_tiles,
)
from compiled_engine.attention.case import KVFormat, Refused
from compiled_engine.attention.latents import LatentHeads, expands
from compiled_engine.kv_format import BY_OPTION

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ASKED = LatentCase("", ((0, 1),)).asked("cpu", torch.float32)


def mistakes(backend: str, device: str, dtypes: Sequence[torch.dtype] = DTYPES) -> dict[str, str]:
    generator = torch.Generator().manual_seed(7)
    drawn = [random_case(generator, storage) for storage in BY_OPTION.values() for _ in range(3)]
    cases = (*CASES, *CODED_CASES, *drawn)
    runs = {f"{case.name} {dtype}": mistake(backend, case, device, dtype) for case in cases for dtype in dtypes}
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
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_on_a_gpu(backend: str, dtype: torch.dtype) -> None:
    assert mistakes(backend, "cuda", [dtype]) == {}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("storage", sorted({*BY_OPTION.values()}))
def test_absorbed_queries_may_be_larger_than_float16_holds(storage: str, device: str) -> None:
    case = LatentCase("small latents", DECODES, storage=storage, latent_size=2.0**-14)
    assert mistake("torch" if device == "cpu" else "triton", case, device, torch.bfloat16) is None


def test_backends_without_such_a_kernel_refuse() -> None:
    with pytest.raises(Refused, match="latent_dim is 24; allowed: 0"):
        get_backend("cpp").accept(ASKED)
    assert choose_backend("auto", "auto", [ASKED]).backend == "torch"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"cache": KVFormat(torch.bfloat16, 16)},
            "kv_cache_dtype is torch.bfloat16; allowed: torch.float32, torch.u.*",
        ),
        (
            {"cache": KVFormat(torch.uint8, 16), "latent_dim": 23},
            "latent_dim is 23; allowed: even numbers with an 8-b.*",
        ),
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
    few, many = (latent_splits(count, 128, 32, 512, 131_072, torch.device("cpu")).count for count in (1, 256))
    assert few > many == 2  # 256 requests of 128 heads: 64 MiB for each split


DRAWN = pytest.mark.product(one_in=1000)
TYPES = dict.fromkeys(("query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr"), "*i32")
TYPES |= dict.fromkeys(("places_ptr", "tiles_ptr", "num_tiles_ptr"), "*i32")
TYPES |= dict.fromkeys(("partial_ptr", "partial_max_ptr", "partial_sum_ptr"), "*fp32")
TYPES |= {"slot_mapping_ptr": "*i64", "scale_log2": "fp32"}
SIZE_OF = {"bf16": 2, "fp32": 4}


def types_of(cache: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return (types, constants) of the arguments of kernels that read a cache. cache: "", or a type of 8 bits."""
    if not cache:
        return TYPES, {"words_ptr": None}
    return TYPES | {"cache_ptr": f"*{cache}", "words_ptr": "*i16"}, {}


# Elements, heads of a rank, latent, rotated part: of DeepSeek-V3 on eight ranks and on one, and of MiniCPM3. The type
# of an 8-bit cache, or nothing.
SIZES = (("bf16", 16, 512, 64), ("bf16", 128, 512, 64), ("bf16", 40, 256, 32))
SIZES = (*SIZES, ("fp32", 16, 512, 64), ("fp32", 128, 512, 64))


@pytest.mark.parametrize(
    ("element", "num_heads", "latent", "rotated", "cache"),
    [
        (*SIZES[0], ""),
        (*SIZES[1], "u8"),
        *(
            pytest.param(*sizes, cache, marks=DRAWN)
            for cache in ("", "u8", "fp8e4nv")
            for sizes in SIZES
            if (sizes, cache) not in ((SIZES[0], ""), (SIZES[1], "u8"))
        ),
    ],
)
def test_kernels_compile_for_hopper(element: str, num_heads: int, latent: int, rotated: int, cache: str) -> None:
    """Tiles fit into the registers, and into the shared memory of every supported GPU."""
    tiles, (types, of_cache) = latent_tiles(num_heads, SIZE_OF[element], coded=bool(cache)), types_of(cache)
    constants = of_cache | {
        "Q_HEAD_STRIDE": latent,
        "ROTATED_HEAD_STRIDE": 128 + rotated,
        "ROTATED_MULTIPLE": 8,
        "OUT_HEAD_STRIDE": latent,
        "NUM_HEADS": num_heads,
        "BLOCK_SIZE": 16,
        "LATENT": latent,
        "ROTATED": rotated,
        "TILE_M": tiles.rows,
        "TILE_N": tiles.keys,
        "TILE_R": triton.next_power_of_2(latent),
        "TILE_P": triton.next_power_of_2(rotated),
        "TILE_S": 8,
        "GRAIN": 32,
    }
    for kernel, options in (
        (write_latents_kernel, {"num_warps": 2}),
        (combine_latents_kernel, {"num_warps": 4}),
        (attend_latents_kernel, {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}),
    ):
        program = compiled(kernel, constants, types, element, options)
        assert_fits(program, MIN_SHARED_MEMORY, options["num_warps"], 16 if cache else 0)

    if element == "bf16" and not cache:  # of prompts on Hopper, up to the largest rotated part
        constants |= {"ROTATED": MOST_ROTATED_OF_LARGE, "TILE_P": MOST_ROTATED_OF_LARGE}
        tiles = latent_tiles(num_heads, 2, coded=False, large=True)
        options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
        large = constants | {"TILE_M": tiles.rows, "TILE_N": tiles.keys}
        program = compiled(attend_latents_kernel, large, types, element, options)
        assert_fits(program, 227 << 10, tiles.num_warps, 320)  # Triton 3.9; 3.6 spills 32 bytes
        assert "wgmma" in program.asm["ptx"]


def compiled(
    kernel: Any, constants: dict[str, Any], types: dict[str, str], element: str, options: dict[str, int]
) -> Any:
    """Return a kernel compiled for Hopper. Tensors are aligned, the cache too, whatever its type is."""
    free = {*TYPES, *constants} - {"partial_ptr"}
    aligned = [name for name in kernel.arg_names if name.endswith("_ptr") and name not in free]
    return compiled_for_hopper(kernel, constants, types, aligned=aligned, pointers=f"*{element}", **options)


def assert_fits(program: Any, shared_memory: int, num_warps: int, most_stack: int = 0) -> None:
    assert program.metadata.shared <= shared_memory
    assert stack_bytes(program) <= most_stack
    assert registers(program) * 32 * num_warps <= 1 << 16


# Of GLM-4.7-Flash, DeepSeek-V3 on eight ranks and MiniCPM3; on Hopper, and with the tiles of every GPU.
@pytest.mark.parametrize(
    ("element", "sizes", "on_hopper", "cache"),
    [
        ("bf16", LatentHeads(20, 192, 64, 512, 256), True, ""),
        ("bf16", LatentHeads(20, 192, 64, 512, 256), True, "fp8e4nv"),
        *(
            pytest.param("bf16", sizes, on_hopper, cache, marks=DRAWN)
            for sizes in (LatentHeads(16, 128, 64, 512, 128), LatentHeads(40, 64, 32, 256, 64))
            for on_hopper in (False, True)
            for cache in ("", "u8", "fp8e4nv")
        ),
        *(
            pytest.param("bf16", LatentHeads(20, 192, 64, 512, 256), on_hopper, cache, marks=DRAWN)
            for on_hopper, cache in ((False, ""), (False, "u8"), (False, "fp8e4nv"), (True, "u8"))
        ),
        *(
            pytest.param("fp32", LatentHeads(20, 192, 64, 512, 256), True, cache, marks=DRAWN)
            for cache in ("", "u8", "fp8e4nv")
        ),
    ],
)
def test_kernels_of_expanded_prompts_compile_for_hopper(
    element: str, sizes: LatentHeads, on_hopper: bool, cache: str
) -> None:
    tiles, (types, of_cache) = expanded_tiles(sizes, SIZE_OF[element], hopper=on_hopper), types_of(cache)
    constants = of_cache | {
        "Q_HEAD_STRIDE": sizes.key,
        "OUT_HEAD_STRIDE": sizes.value,
        "BLOCK_SIZE": 16,
        "LATENT": sizes.latent,
        "ROTATED": sizes.rotated,
        "OWN": sizes.own,
        "KEY": sizes.key,
        "VALUE": sizes.value,
        "TILE_L": tiles.rows,
        "TILE_C": tiles.columns,
        "TILE_R": tiles.chunk,
        "TILE_P": sizes.rotated,
        "TILE_M": tiles.queries,
        "TILE_N": tiles.keys,
        "TILE_K": tile_of(sizes.key),
        "TILE_V": tile_of(sizes.value),
        "MULTIPLE": 8,
        "CROSSOVER": sizes.crossover,
    }
    of_products = {
        "X_HEAD_STRIDE": sizes.key,
        "WEIGHT_HEAD_STRIDE": (sizes.own + sizes.value) * sizes.latent,
        "WEIGHT_K_STRIDE": sizes.latent,
        "WEIGHT_C_STRIDE": 1,
        "NUM_K": sizes.own,
        "NUM_C": sizes.latent,
        "TILE_M": latent_step.TILE_M,
        "TILE_C": latent_step.TILE_C,
        "TILE_K": latent_step.TILE_K,
    }
    expand_options = {"num_warps": tiles.expand_warps, "num_stages": tiles.expand_stages}
    for kernel, given, options in (
        (place_kernel, {}, {"num_warps": 1}),
        (latent_step.multiply_kernel, of_products, {"num_warps": 4, "num_stages": 2}),
        (expand_rows_kernel, {}, expand_options),
        (attend_expanded_kernel, {}, {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}),
    ):
        program = compiled(kernel, constants | given, types, element, options)
        assert_fits(program, 220 << 10 if on_hopper else MIN_SHARED_MEMORY, options["num_warps"])


def test_the_workspace_is_bounded_and_no_smaller_step_takes_more() -> None:
    """The first batch of the warm-up has the most tokens and requests and the longest bound; its memory is measured."""
    sizes, most = LatentHeads(20, 192, 64, 512, 256), 512 << 20

    def workspace(num_tokens: int, num_requests: int, max_seq_len: int) -> Workspace:
        found = Workspace.of(sizes, 2, 128, num_tokens, num_requests, max_seq_len, most)
        assert found is not None
        assert found.capacity * 128 * found.heads * sizes.key * 2 * 2 <= found.nbytes <= most
        return found

    largest = workspace(8192, 256, 131_072)
    for step in ((8192, 1, 131_072), (8192, 3, 4000), (256, 1, 256), (8192, 60, 131_072), (300, 256, 131_072)):
        assert workspace(*step).nbytes <= largest.nbytes
    assert workspace(8192, 3, 4000).heads == 20  # a step of usual prompts expands all heads at once
    assert workspace(8192, 1, 131_072).heads == 4
    assert Workspace.of(sizes, 2, 128, 255, 3, 4000, most) is None
    assert Workspace.of(sizes._replace(value=264), 2, 128, 8192, 3, 4000, most) is None


def test_requests_are_expanded_where_that_takes_fewer_multiplications() -> None:
    sizes = LatentHeads(20, 192, 64, 512, 256)

    def multiplications(query_len: int, seq_len: int) -> tuple[float, float]:
        pairs = query_len * (seq_len - query_len / 2)
        product = sizes.latent * (sizes.own + sizes.value)
        absorbed = query_len * product + pairs * (2 * sizes.latent + sizes.rotated)
        return seq_len * product + pairs * (sizes.key + sizes.value), absorbed

    for query_len in (1, 4, 300, 397, 399, 2048):
        for seq_len in (query_len, query_len + 100, 4000, 100_000):
            expanded, absorbed = multiplications(query_len, seq_len)
            assert expands(query_len, seq_len, sizes.crossover) == (expanded < absorbed)
    assert not expands(300, 1_000_000, LatentHeads(4, 600, 0, 512, 512).crossover)
