"""The Triton kernels compiled for a Hopper GPU, which needs none: they must fit, and spill no registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from hopper_compilation import HOPPER, registers, stack_bytes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compiled_engine.attention.backends.decode_splits import GRAIN, MAX_LISTED_SPLITS, MAX_SPLITS, SMALL
from compiled_engine.attention.backends.decoded_contexts import TILE, decode_contexts_kernel
from compiled_engine.attention.backends.triton_backend import MIN_SHARED_MEMORY
from compiled_engine.attention.backends.triton_combine import combine_kernel
from compiled_engine.attention.backends.triton_decode import (
    decode_kernel,
    decode_tiles,
    draft_tiles,
    queries_of_tile,
)
from compiled_engine.attention.backends.triton_listed_decode import listed_decode_kernel, listed_decode_tiles
from compiled_engine.attention.backends.triton_packed import FEW_TOKENS, SEARCHED, packed_kernel, packed_tiles
from compiled_engine.attention.backends.triton_prefill import SHORT_CONTEXT, prefill_kernel, prefill_tiles
from compiled_engine.attention.backends.triton_rope_decode import rope_decode_kernel
from compiled_engine.attention.backends.triton_write_kv import write_kv_kernel
from compiled_engine.attention.backends.work_list import HEADER, list_kernel
from compiled_engine.kv_format import head_width

ADA = GPUTarget("cuda", 89, 32)
ELEMENTS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv"}
# Of caches of 8 bits.
SCALES = {torch.uint8: "*i16", torch.float8_e4m3fn: "*fp32"}
INDICES = {
    "query_start_loc_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "block_table_ptr": "*i32",
    "slot_mapping_ptr": "*i64",
    "work_ptr": "*i32",
    "num_tiles_ptr": "*i32",
    "new_table_ptr": "*i32",
    "arrived_ptr": "*i32",
    "sinks_ptr": "*bf16",
}
# Of decodes without drafts.
ONE_QUERY = {"QUERY_LEN": 1, "TILE_QUERIES": 1, "TILE_Q": 1}
PLAIN = {"sinks_ptr": None, "scales_ptr": None, "CAP_SCALE": 0.0}
# Bytes that may be spilled where registers hold a whole tile; Triton 3.9 spills more than 3.6.
SPILLED = 400
# Query heads, K/V heads, head size: those of small Qwen and Llama models, and the extremes that are allowed.
VARIANTS = [
    (torch.bfloat16, (4, 2, 64)),
    (torch.bfloat16, (16, 8, 128)),
    (torch.bfloat16, (4, 4, 80)),
    (torch.bfloat16, (32, 1, 256)),
    (torch.float32, (4, 2, 64)),
    (torch.float32, (32, 1, 256)),
]


def drawn_but_one(*further: tuple[torch.dtype, tuple[int, int, int]]) -> list[Any]:
    """The variants, of which one always runs, for each of the tiles that depend on more than the variant."""
    always, product = VARIANTS[1], pytest.mark.product(one_in=1000)
    return [always, *(pytest.param(*each, marks=product) for each in (*further, *VARIANTS) if each != always)]


def without_machine_code(*compilation: Any) -> tuple[str, str]:
    """A hook of triton.compile: it ends with LLVM's code, before which shared memory is laid out."""
    if compilation:
        _, stages, *_ = compilation
        stages["ptx"] = lambda _, metadata: metadata.update(name="none") or ""
        stages["cubin"] = lambda *_: b""
    return "without machine code", "without machine code"  # in the key of Triton's cache


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Compile a kernel, assert that it fits (so many programs on a multiprocessor) and spills at most so many bytes a
    thread, and return its PTX."""

    def compile_and_check(
        kernel: Any,
        dtype: torch.dtype,
        constants: dict[str, Any],
        spilled: int = 0,
        programs: int = 1,
        cache: torch.dtype | None = None,
        **options: Any,
    ) -> str:
        kernel = getattr(kernel, "jit_function", kernel)
        signature, attributes = {}, {}
        for index, name in enumerate(kernel.arg_names):
            if name in constants:
                signature[name] = "constexpr"
            elif name in INDICES:
                signature[name] = INDICES[name]
            elif name == "scales_ptr":
                signature[name] = SCALES[cache]
            elif name.endswith("_ptr"):
                signature[name] = (
                    "*fp32"
                    if name.startswith("partial")
                    else ELEMENTS[cache if cache and name == "cache_ptr" else dtype]
                )
                attributes[(index,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if name in ("scale_log2", "eps") else "i32"
        constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(kernel, signature, constexprs, attributes)
        program = triton.compile(source, target=HOPPER, options={"enable_fp_fusion": True, **options})
        # Of 228 KiB each program takes one more than it asks for.
        assert programs * (program.metadata.shared + 1024) <= 228 << 10
        assert stack_bytes(program) <= spilled
        assert programs * -(-registers(program) // 8) * 8 * 32 * options["num_warps"] <= 1 << 16
        if "DEPENDENT_LAUNCH" in constants:
            constexprs[(kernel.arg_names.index("DEPENDENT_LAUNCH"),)] = False
        options.pop("launch_pdl", None)
        on_ada = ASTSource(kernel, signature, constexprs, attributes)
        with monkeypatch.context() as patched:
            patched.setattr(triton.knobs.runtime, "add_stages_inspection_hook", without_machine_code)
            program_on_ada = triton.compile(on_ada, target=ADA, options={"enable_fp_fusion": True, **options})
        assert program_on_ada.metadata.shared <= MIN_SHARED_MEMORY
        return program.asm["ptx"]

    return compile_and_check


def constants(num_heads: int, num_kv_heads: int, head_dim: int, **further: Any) -> dict[str, Any]:
    return PLAIN | {
        "Q_HEAD_STRIDE": head_dim,
        "OUT_HEAD_STRIDE": head_dim,
        "WINDOW": 0,
        "GROUP": num_heads // num_kv_heads,
        "BLOCK_SIZE": 16,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "WIDTH": head_dim,
        "TILE_D": triton.next_power_of_2(head_dim),
        **further,
    }


@pytest.mark.parametrize("max_seq_len", [SHORT_CONTEXT, SHORT_CONTEXT + 1])
@pytest.mark.parametrize(("dtype", "shape"), drawn_but_one())
def test_prefill(check: Callable[..., str], dtype: torch.dtype, shape: tuple[int, int, int], max_seq_len: int) -> None:
    tiles = prefill_tiles(shape[2], dtype.itemsize, max_seq_len)
    further = {"MAX_SPLITS": MAX_LISTED_SPLITS, "HEADER": HEADER, "DEPENDENT_LAUNCH": True}
    chosen = constants(*shape, TILE_M=tiles.rows, TILE_N=tiles.keys, **further)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "launch_pdl": True}
    # With heads of size 256 Triton 3.9 spills some addresses, which 3.6 does not.
    ptx = check(
        prefill_kernel, dtype, chosen, spilled=104 if shape[2] == 256 else 0, programs=tiles.programs, **options
    )
    assert ("wgmma" in ptx) == (dtype != torch.float32)
    assert "cp.async.cg.shared.global" in ptx


@pytest.mark.parametrize("num_tokens", [FEW_TOKENS, FEW_TOKENS + 1])
@pytest.mark.parametrize(("dtype", "shape"), drawn_but_one((torch.bfloat16, (12, 12, 32))))
def test_packed(check: Callable[..., str], dtype: torch.dtype, shape: tuple[int, int, int], num_tokens: int) -> None:
    tiles = packed_tiles(shape[2], dtype.itemsize, num_tokens)
    sizes = {"TILE_M": tiles.queries, "TILE_N": tiles.keys, "SEARCHED": SEARCHED, "DEPENDENT_LAUNCH": True}
    chosen = constants(*shape, K_HEAD_STRIDE=shape[2], V_HEAD_STRIDE=shape[2], **sizes)
    chosen = {name: chosen[name] for name in packed_kernel.arg_names if name in chosen}
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "launch_pdl": True}
    ptx = check(packed_kernel, dtype, chosen, spilled=64, **options)
    assert ("wgmma" in ptx) == (dtype != torch.float32 and tiles.queries >= 64)
    assert "cp.async.cg.shared.global" in ptx


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("programs", [1, 2, SMALL])
@pytest.mark.parametrize(("dtype", "shape"), VARIANTS)
def test_decode(check: Callable[..., str], dtype: torch.dtype, shape: tuple[int, int, int], programs: int) -> None:
    tiles = decode_tiles(shape[2], dtype.itemsize, programs)
    further = {"GRAIN": GRAIN, "LOOK_AHEAD": tiles.look_ahead, "DEPENDENT_LAUNCH": True, **ONE_QUERY}
    chosen = constants(*shape, TILE_M=max(16, shape[0] // shape[1]), TILE_N=tiles.keys, **further)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "launch_pdl": True}
    # With a single warp Triton 3.9 spills some addresses, which 3.6 does not.
    ptx = check(decode_kernel, dtype, chosen, spilled=96 if programs == SMALL else 0, **options)
    # K and V come in 16 bytes at a time, while earlier tiles are computed.
    assert "cp.async.cg.shared.global" in ptx
    assert "griddepcontrol.wait" in ptx


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("query_len", [4, 9])
@pytest.mark.parametrize("programs", [1, 2, SMALL])
@pytest.mark.parametrize(("dtype", "shape"), [(torch.bfloat16, (32, 8, 128)), *VARIANTS])
def test_decode_with_drafts(
    check: Callable[..., str], dtype: torch.dtype, shape: tuple[int, int, int], programs: int, query_len: int
) -> None:
    group = shape[0] // shape[1]
    tile_queries = queries_of_tile(query_len, group, dtype.itemsize)
    rows = max(16, triton.next_power_of_2(tile_queries * group))
    tiles = draft_tiles(shape[2], dtype.itemsize, programs, rows)
    further = {"GRAIN": GRAIN, "LOOK_AHEAD": tiles.look_ahead, "DEPENDENT_LAUNCH": True, "QUERY_LEN": query_len}
    further |= {"TILE_QUERIES": tile_queries, "TILE_Q": triton.next_power_of_2(query_len)}
    chosen = constants(*shape, TILE_M=rows, TILE_N=tiles.keys, **further)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "launch_pdl": True}
    ptx = check(decode_kernel, dtype, chosen, spilled=96 if programs == SMALL else 0, **options)
    assert "cp.async.cg.shared.global" in ptx
    assert "griddepcontrol.wait" in ptx


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(("dtype", "shape"), VARIANTS)
def test_rope_decode(check: Callable[..., str], dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    tiles = decode_tiles(shape[2], dtype.itemsize, SMALL)
    further = {f"{name}_HEAD_STRIDE": shape[2] for name in ("Q", "K", "V", "OUT")}
    further |= {"OFFSET": 0.0, "WIDE": False, "STRIDE_MULTIPLE": 8, "GRAIN": GRAIN, "DEPENDENT_LAUNCH": True}
    further |= {"FIRST_N": tiles.keys}
    chosen = constants(*shape, TILE_M=max(16, shape[0] // shape[1]), TILE_N=tiles.keys, **further)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "launch_pdl": True}
    # The first tile is held in registers while q is made, which spills some addresses.
    ptx = check(rope_decode_kernel, dtype, chosen, spilled=SPILLED, **options)
    assert "cp.async.cg.shared.global" in ptx
    # The first keys and values are asked for before the wait.
    before_the_wait, _, _ = ptx.partition("griddepcontrol.wait")
    assert before_the_wait.count("ld.global.v4") >= 2


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(("dtype", "shape"), VARIANTS)
def test_listed_decode(check: Callable[..., str], dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    tiles = listed_decode_tiles(shape[2], dtype.itemsize)
    further = {"MAX_SPLITS": MAX_LISTED_SPLITS, "HEADER": HEADER, "GRAIN": GRAIN, "DEPENDENT_LAUNCH": True}
    chosen = constants(*shape, TILE_M=max(16, shape[0] // shape[1]), TILE_N=tiles.keys, **further)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "launch_pdl": True}
    # Triton 3.6 spills a little of the largest tile; 3.9 does not.
    spilled = 16 if dtype == torch.float32 and shape[2] == 256 else 0
    ptx = check(listed_decode_kernel, dtype, chosen, spilled=spilled, programs=tiles.programs, **options)
    assert "cp.async.cg.shared.global" in ptx
    assert "griddepcontrol.wait" in ptx
    assert "atom.global.gpu.acq_rel" in ptx


def _options(tiles: Any) -> dict[str, Any]:
    return {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "launch_pdl": True}


# Of GPT-OSS, Phi-3, Gemma 2 of 27B and of 9B.
CAPPED = pytest.mark.parametrize("head_dim", [64, 96, 128, 256])


def capped(head_dim: int, **further: Any) -> dict[str, Any]:
    """Constants with a soft cap and sinks."""
    chosen = constants(8, 4, head_dim, CAP_SCALE=0.0017, DEPENDENT_LAUNCH=True, **further)
    return {name: value for name, value in chosen.items() if name != "sinks_ptr"}


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("max_seq_len", [SHORT_CONTEXT, SHORT_CONTEXT + 1])
@CAPPED
def test_soft_cap_and_sinks_in_prefill(check: Callable[..., str], head_dim: int, max_seq_len: int) -> None:
    tiles = prefill_tiles(head_dim, 2, max_seq_len)
    sizes = {"TILE_M": tiles.rows, "TILE_N": tiles.keys, "MAX_SPLITS": MAX_LISTED_SPLITS, "HEADER": HEADER}
    spilled = 104 if head_dim == 256 else 0
    chosen = capped(head_dim, **sizes)
    check(prefill_kernel, torch.bfloat16, chosen, spilled=spilled, programs=tiles.programs, **_options(tiles))


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("programs", [1, 2, SMALL])
@CAPPED
def test_soft_cap_and_sinks_in_decode(check: Callable[..., str], head_dim: int, programs: int) -> None:
    tiles = decode_tiles(head_dim, 2, programs)
    sizes = {"TILE_M": 16, "TILE_N": tiles.keys, "GRAIN": GRAIN, "LOOK_AHEAD": tiles.look_ahead}
    chosen = capped(head_dim, **sizes, **ONE_QUERY)
    spilled = 96 if programs == SMALL else 0
    check(decode_kernel, torch.bfloat16, chosen, spilled=spilled, **_options(tiles))


@pytest.mark.product(one_in=1000)
@CAPPED
def test_soft_cap_and_sinks_in_listed_decode(check: Callable[..., str], head_dim: int) -> None:
    tiles = listed_decode_tiles(head_dim, 2)
    listed = {"MAX_SPLITS": MAX_LISTED_SPLITS, "HEADER": HEADER}
    chosen = capped(head_dim, TILE_M=16, TILE_N=tiles.keys, GRAIN=GRAIN, **listed)
    spilled = 16 if head_dim == 256 else 0
    options = _options(tiles)
    check(listed_decode_kernel, torch.bfloat16, chosen, spilled=spilled, programs=tiles.programs, **options)


def test_work_list(check: Callable[..., str]) -> None:
    chosen = {"HEADER": HEADER, "QUERIES": 64, "MAX_SPLITS": MAX_LISTED_SPLITS, "NUM_KV_HEADS": 8, "TILE_K": 8}
    check(list_kernel, torch.bfloat16, chosen | {"DEPENDENT_LAUNCH": True}, num_warps=1, launch_pdl=True)


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_combine(check: Callable[..., str], head_dim: int) -> None:
    chosen = {
        "sinks_ptr": None,
        "OUT_HEAD_STRIDE": head_dim,
        "WINDOW": 0,
        "HEAD_DIM": head_dim,
        "TILE_S": MAX_SPLITS,
        "TILE_D": triton.next_power_of_2(head_dim),
        "GRAIN": GRAIN,
        "DEPENDENT_LAUNCH": True,
    }
    for query_len in (1, 4):
        shared = {"QUERY_LEN": query_len, "TILE_Q": query_len}
        ptx = check(combine_kernel, torch.bfloat16, chosen | shared, num_warps=4, launch_pdl=True)
        assert "ld.global.v4" in ptx


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(("num_kv_heads", "head_dim", "num_warps"), [(8, 128, 4), (4, 80, 1)])
def test_write_kv(check: Callable[..., str], num_kv_heads: int, head_dim: int, num_warps: int) -> None:
    chosen = {
        "K_HEAD_STRIDE": head_dim,
        "V_HEAD_STRIDE": head_dim,
        "BLOCK_SIZE": 16,
        "NUM_KV_HEADS": num_kv_heads,
        "scales_ptr": None,
        "HEAD_DIM": head_dim,
        "WIDTH": head_dim,
        "TILE_K": triton.next_power_of_2(num_kv_heads),
        "TILE_D": triton.next_power_of_2(head_dim),
        "DEPENDENT_LAUNCH": True,
    }
    ptx = check(write_kv_kernel, torch.bfloat16, chosen, num_warps=num_warps)
    assert "ld.global.v4" in ptx
    assert "st.global.v4" in ptx


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("cache", [torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("head_dim", [80, 128])
def test_decoded_contexts(check: Callable[..., str], head_dim: int, cache: torch.dtype) -> None:
    chosen = {
        "WINDOW": 100,
        "BLOCK_SIZE": 16,
        "NUM_KV_HEADS": 8,
        "HEAD_DIM": head_dim,
        "WIDTH": head_width(cache, head_dim),
        "TILE_H": TILE // 128,
        "TILE_D": triton.next_power_of_2(head_dim),
        "DEPENDENT_LAUNCH": True,
    }
    options = {"num_warps": 4, "launch_pdl": True}
    ptx = check(decode_contexts_kernel, torch.bfloat16, chosen, cache=cache, spilled=8, **options)
    assert "ld.global.v4" in ptx
    assert "st.global.v4" in ptx


def coded(cache: torch.dtype, chosen: dict[str, Any]) -> dict[str, Any]:
    """The constants over a cache of 8 bits with scales."""
    del chosen["scales_ptr"]
    return chosen | {"WIDTH": head_width(cache, chosen["HEAD_DIM"])}


def _prefill_over_codes(
    dtype: torch.dtype, shape: tuple[int, int, int], max_seq_len: int
) -> tuple[Any, Any, dict[str, Any], int]:
    tiles = prefill_tiles(shape[2], dtype.itemsize, max_seq_len)
    listed = {"MAX_SPLITS": MAX_LISTED_SPLITS, "HEADER": HEADER, "DEPENDENT_LAUNCH": True}
    programs = tiles.programs if dtype.itemsize == 2 else 1
    return prefill_kernel, tiles, {"TILE_M": tiles.rows, "TILE_N": tiles.keys, **listed}, programs


def _decode_over_codes(
    dtype: torch.dtype, shape: tuple[int, int, int], programs: int
) -> tuple[Any, Any, dict[str, Any], int]:
    tiles = decode_tiles(shape[2], dtype.itemsize, programs)
    further = {"GRAIN": GRAIN, "LOOK_AHEAD": tiles.look_ahead, "DEPENDENT_LAUNCH": True, **ONE_QUERY}
    return decode_kernel, tiles, {"TILE_M": max(16, shape[0] // shape[1]), "TILE_N": tiles.keys, **further}, 1


def _listed_decode_over_codes(
    dtype: torch.dtype, shape: tuple[int, int, int], _: int
) -> tuple[Any, Any, dict[str, Any], int]:
    tiles = listed_decode_tiles(shape[2], dtype.itemsize)
    listed = {"MAX_SPLITS": MAX_LISTED_SPLITS, "HEADER": HEADER, "GRAIN": GRAIN, "DEPENDENT_LAUNCH": True}
    rows = max(16, shape[0] // shape[1])
    return listed_decode_kernel, tiles, {"TILE_M": rows, "TILE_N": tiles.keys, **listed}, tiles.programs


def _rope_decode_over_codes(
    dtype: torch.dtype, shape: tuple[int, int, int], _: int
) -> tuple[Any, Any, dict[str, Any], int]:
    tiles = decode_tiles(shape[2], dtype.itemsize, SMALL)
    further = {f"{name}_HEAD_STRIDE": shape[2] for name in ("Q", "K", "V", "OUT")}
    further |= {"OFFSET": 0.0, "WIDE": False, "STRIDE_MULTIPLE": 8, "GRAIN": GRAIN, "DEPENDENT_LAUNCH": True}
    further |= {"FIRST_N": tiles.keys, "TILE_M": max(16, shape[0] // shape[1]), "TILE_N": tiles.keys}
    return rope_decode_kernel, tiles, further, 1


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (_prefill_over_codes, SHORT_CONTEXT),
        (_prefill_over_codes, SHORT_CONTEXT + 1),
        *((_decode_over_codes, programs) for programs in (1, 2, SMALL)),
        (_listed_decode_over_codes, 0),
        (_rope_decode_over_codes, 0),
    ],
)
@pytest.mark.parametrize("cache", [torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("dtype", "shape"), VARIANTS)
def test_caches_of_8_bits(
    check: Callable[..., str],
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    cache: torch.dtype,
    kind: Callable[..., tuple[Any, Any, dict[str, Any], int]],
    number: int,
) -> None:
    """Codes become numbers in registers, which may spill a little."""
    kernel, tiles, further, programs = kind(dtype, shape, number)
    chosen = coded(cache, constants(*shape, **further))
    spilled = 2 * SPILLED if kernel is rope_decode_kernel else SPILLED
    check(kernel, dtype, chosen, spilled=spilled, programs=programs, cache=cache, **_options(tiles))
