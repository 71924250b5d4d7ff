"""The Triton kernels compiled for a Hopper GPU, which needs none: they must fit, and spill no registers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import triton
from hopper_compilation import HOPPER, registers, stack_bytes
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compiled_engine.attention.backends.decode_splits import GRAIN, MAX_LISTED_SPLITS, MAX_SPLITS, SMALL
from compiled_engine.attention.backends.decoded_contexts import TILE, decode_contexts_kernel
from compiled_engine.attention.backends.kernel_arguments import rows_of
from compiled_engine.attention.backends.triton_backend import MIN_SHARED_MEMORY
from compiled_engine.attention.backends.triton_combine import WIDEST_PART, combine_kernel
from compiled_engine.attention.backends.triton_decode import decode_kernel, decode_tiles, query_options
from compiled_engine.attention.backends.triton_listed_decode import listed_decode_kernel, listed_decode_tiles
from compiled_engine.attention.backends.triton_packed import FEW_TOKENS, SEARCHED, packed_kernel, packed_tiles
from compiled_engine.attention.backends.triton_prefill import SHORT_CONTEXT, prefill_kernel, prefill_tiles
from compiled_engine.attention.backends.triton_rope_decode import rope_decode_kernel
from compiled_engine.attention.backends.triton_write_kv import write_kv_kernel
from compiled_engine.attention.backends.wide_tiles import tile_of_head
from compiled_engine.attention.backends.work_list import HEADER, list_kernel
from compiled_engine.kv_format import head_width

ADA = GPUTarget("cuda", 89, 32)
ELEMENTS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv"}
# The scales of 8-bit caches.
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
    "keys_ahead_ptr": "*i32",
}
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
# Wide heads: those of Gemma 4, and the extremes that are allowed. A head of 320 elements has a padded tail.
WIDE = [
    (torch.bfloat16, (8, 1, 512)),
    (torch.bfloat16, (32, 1, 512)),
    (torch.bfloat16, (8, 8, 320)),
    (torch.bfloat16, (32, 1, 576)),
    (torch.float32, (16, 1, 512)),
    (torch.float32, (16, 1, 576)),
]


def without_machine_code(*compilation: Any) -> tuple[str, str]:
    """End triton.compile with LLVM's code, before which shared memory is laid out. A hook of Triton."""
    if compilation:
        _, stages, *_ = compilation
        stages["ptx"] = lambda _, metadata: metadata.update(name="none") or ""
        stages["cubin"] = lambda *_: b""
    return "without machine code", "without machine code"  # in the key of Triton's cache


class Compilation(NamedTuple):
    """A kernel with the constants and options of one of its launches."""

    kernel: Any
    constants: dict[str, Any]  # beyond those of `constants_of`
    num_warps: int
    num_stages: int | None = None
    programs: int = 1  # that must fit on a multiprocessor
    images: bool = False  # whose tokens see each other
    large: bool = False  # only for Hopper

    @classmethod
    def of(cls, kernel: Any, tiles: Any, programs: int = 1, **constants: Any) -> Compilation:
        return cls(kernel, {"TILE_N": tiles.keys, **constants}, tiles.num_warps, tiles.num_stages, programs)


Shape = tuple[int, int, int]


def prefill(
    dtype: torch.dtype,
    shape: Shape,
    max_seq_len: int,
    coded: bool = False,
    shared: bool = False,
    large: bool = False,
) -> Compilation:
    tiles = prefill_tiles(shape[2], dtype.itemsize, max_seq_len, large)
    programs = 1 if coded and dtype.itemsize == 4 else tiles.programs
    partials = {} if shared else dict.fromkeys(("partial_ptr", "partial_max_ptr", "partial_sum_ptr"))
    sizes = {"TILE_M": tiles.rows, "MAX_SPLITS": MAX_LISTED_SPLITS}
    return Compilation.of(prefill_kernel, tiles, programs, **sizes, **partials)._replace(large=large)


def decode(dtype: torch.dtype, shape: Shape, programs: int, query_len: int = 1) -> Compilation:
    options = query_options(query_len, shape[0] // shape[1], shape[2], dtype.itemsize, programs)
    return Compilation(decode_kernel, options, options["num_warps"], options["num_stages"])


def listed_decode(dtype: torch.dtype, shape: Shape, _: int = 0) -> Compilation:
    rows = rows_of(shape[0] // shape[1])
    tiles = listed_decode_tiles(shape[2], dtype.itemsize, rows)
    sizes = {"TILE_M": rows, "MAX_SPLITS": MAX_LISTED_SPLITS}
    return Compilation.of(listed_decode_kernel, tiles, tiles.programs, **sizes)


def rope_decode(dtype: torch.dtype, shape: Shape, _: int = 0) -> Compilation:
    tiles = decode_tiles(shape[2], dtype.itemsize, SMALL)
    sizes = {"TILE_M": rows_of(shape[0] // shape[1]), "FIRST_N": tiles.keys}
    return Compilation.of(rope_decode_kernel, tiles, **sizes)


def packed(dtype: torch.dtype, shape: Shape, num_tokens: int) -> Compilation:
    tiles = packed_tiles(shape[2], dtype.itemsize, num_tokens)
    return Compilation.of(packed_kernel, tiles, TILE_M=tiles.queries, SEARCHED=SEARCHED)


def constants_of(compilation: Compilation, shape: Shape, cache: torch.dtype | None, cap_scale: float) -> dict[str, Any]:
    """Return the kernel's constants. cap_scale: that of a layer with a soft cap and sinks; 0: without both."""
    num_heads, num_kv_heads, head_dim = shape
    given = {f"{name}_HEAD_STRIDE": head_dim for name in ("Q", "K", "V", "OUT")} | {
        "OFFSET": 0.0,
        "WIDE": False,
        "STRIDE_MULTIPLE": 8,
        "WINDOW": 0,
        "CAP_SCALE": cap_scale,
        "GROUP": num_heads // num_kv_heads,
        "BLOCK_SIZE": 16,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "WIDTH": head_width(cache, head_dim) if cache else head_dim,
        "TILE_D": tile_of_head(head_dim),
        "HEADER": HEADER,
        "GRAIN": GRAIN,
        "DEPENDENT_LAUNCH": True,
        "biases_ptr": None,
        "NUM_BIASES": 0,
    }
    given |= ({} if cap_scale else {"sinks_ptr": None}) | ({} if cache else {"scales_ptr": None})
    given |= {} if compilation.images else {"keys_ahead_ptr": None}
    given |= compilation.constants
    if given["NUM_BIASES"]:
        del given["biases_ptr"]
    return {name: given[name] for name in compilation.kernel.arg_names if name in given}


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Compile a kernel, assert that it fits on Hopper, and on Ada if it must, and return its PTX for Hopper.

    It fits if shared memory and registers are enough for its programs, and a thread spills at most `spilled` bytes.
    """

    def compile_and_check(
        compilation: Compilation,
        dtype: torch.dtype,
        shape: Shape,
        spilled: int = 0,
        cache: torch.dtype | None = None,
        cap_scale: float = 0.0,
    ) -> str:
        kernel, constants = compilation.kernel, constants_of(compilation, shape, cache, cap_scale)
        signature, attributes = {}, {}
        for index, name in enumerate(kernel.arg_names):
            if name in constants:
                signature[name] = "constexpr"
            elif name in INDICES:
                signature[name] = INDICES[name]
            elif name == "scales_ptr":
                signature[name] = SCALES[cache]  # type: ignore[index]
            elif name.endswith("_ptr"):
                element = ELEMENTS[cache if cache and name == "cache_ptr" else dtype]
                signature[name] = "*fp32" if name.startswith("partial") else element
                attributes[(index,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if name in ("scale_log2", "bias_factor", "eps") else "i32"

        def compiled(target: GPUTarget, **given: Any) -> Any:
            jit_function = getattr(kernel, "jit_function", kernel)
            values = {(kernel.arg_names.index(name),): value for name, value in (constants | given).items()}
            options = {"enable_fp_fusion": True, "num_warps": compilation.num_warps}
            options |= {"num_stages": compilation.num_stages} if compilation.num_stages else {}
            options |= {} if given else {"launch_pdl": True}
            return triton.compile(ASTSource(jit_function, signature, values, attributes), target, options)

        program = compiled(HOPPER)
        # Of 228 KiB each program takes one more than it asks for.
        assert compilation.programs * (program.metadata.shared + 1024) <= 228 << 10
        assert stack_bytes(program) <= spilled
        allocated = -(-registers(program) // 8) * 8 * 32 * compilation.num_warps
        assert compilation.programs * allocated <= 1 << 16
        if compilation.large:
            return program.asm["ptx"]
        with monkeypatch.context() as patched:
            patched.setattr(triton.knobs.runtime, "add_stages_inspection_hook", without_machine_code)
            patched.setenv("DISABLE_LLVM_OPT", "1")  # LLVM's code is optimised after shared memory is laid out
            assert compiled(ADA, DEPENDENT_LAUNCH=False).metadata.shared <= MIN_SHARED_MEMORY
        return program.asm["ptx"]

    return compile_and_check


@pytest.mark.product(one_in=1000, each=("max_seq_len",))
@pytest.mark.parametrize("max_seq_len", [SHORT_CONTEXT, SHORT_CONTEXT + 1])
@pytest.mark.parametrize(("dtype", "shape"), VARIANTS)
def test_prefill(check: Callable[..., str], dtype: torch.dtype, shape: Shape, max_seq_len: int) -> None:
    # With heads of size 256 Triton 3.9 spills some addresses, which 3.6 does not.
    ptx = check(prefill(dtype, shape, max_seq_len), dtype, shape, spilled=104 if shape[2] == 256 else 0)
    assert ("wgmma" in ptx) == (dtype != torch.float32)
    assert "cp.async.cg.shared.global" in ptx


@pytest.mark.product(one_in=1000, each=("shape",))
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("cache", [None, torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [(16, 8, 256), (16, 2, 512), (32, 1, 576)])
def test_prefill_with_large_tiles(
    check: Callable[..., str], shape: Shape, cache: torch.dtype | None, shared: bool
) -> None:
    compilation = prefill(torch.bfloat16, shape, SHORT_CONTEXT + 1, shared=shared, large=True)
    # Codes are decoded while registers hold the sums of all rows.
    ptx = check(compilation, torch.bfloat16, shape, spilled=3 * SPILLED + 80 if cache else 312, cache=cache)
    assert "wgmma" in ptx
    assert "cp.async.cg.shared.global" in ptx


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(("dtype", "shape"), VARIANTS)
def test_prefill_with_shared_keys(check: Callable[..., str], dtype: torch.dtype, shape: Shape) -> None:
    compilation = prefill(dtype, shape, SHORT_CONTEXT + 1, shared=True)
    ptx = check(compilation, dtype, shape, spilled=136 if shape[2] == 256 else 16)
    assert "atom.global.gpu.acq_rel" in ptx or "atom.acq_rel.gpu.global" in ptx
    assert ("wgmma" in ptx) == (dtype != torch.float32)
    assert "cp.async.cg.shared.global" in ptx


@pytest.mark.parametrize("max_seq_len", [SHORT_CONTEXT, SHORT_CONTEXT + 1])
def test_prefill_of_images(check: Callable[..., str], max_seq_len: int) -> None:
    dtype, shape = torch.bfloat16, (8, 4, 256)  # of Gemma 3
    ptx = check(prefill(dtype, shape, max_seq_len)._replace(images=True), dtype, shape, spilled=136)
    assert "wgmma" in ptx


@pytest.mark.product(one_in=1000, each=("num_tokens",))
@pytest.mark.parametrize("num_tokens", [FEW_TOKENS, FEW_TOKENS + 1])
@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.bfloat16, (12, 12, 32)), (torch.bfloat16, (16, 16, 72)), *VARIANTS]
)
def test_packed(check: Callable[..., str], dtype: torch.dtype, shape: Shape, num_tokens: int) -> None:
    compilation = packed(dtype, shape, num_tokens)
    ptx = check(compilation, dtype, shape, spilled=64)
    assert ("wgmma" in ptx) == (dtype != torch.float32 and compilation.constants["TILE_M"] >= 64)
    assert "cp.async.cg.shared.global" in ptx


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("num_tokens", [FEW_TOKENS, FEW_TOKENS + 1])
def test_packed_with_biases(check: Callable[..., str], num_tokens: int) -> None:
    dtype, shape = torch.bfloat16, (12, 12, 64)  # of MPNet
    compilation = packed(dtype, shape, num_tokens)
    compilation.constants["NUM_BIASES"] = 257
    assert "wgmma" in check(compilation, dtype, shape, spilled=64)


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("query_len", [1, 4, 9])
@pytest.mark.parametrize("programs", [1, 2, SMALL])
@pytest.mark.parametrize(("dtype", "shape"), [(torch.bfloat16, (32, 8, 128)), *VARIANTS])
def test_decode(check: Callable[..., str], dtype: torch.dtype, shape: Shape, programs: int, query_len: int) -> None:
    # With a single warp Triton 3.9 spills some addresses, which 3.6 does not.
    ptx = check(decode(dtype, shape, programs, query_len), dtype, shape, spilled=96 if programs == SMALL else 0)
    # K and V come in 16 bytes at a time, while earlier tiles are computed.
    assert "cp.async.cg.shared.global" in ptx
    assert "griddepcontrol.wait" in ptx


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(("dtype", "shape"), VARIANTS)
def test_rope_decode(check: Callable[..., str], dtype: torch.dtype, shape: Shape) -> None:
    # The first tile is held in registers while q is made, which spills some addresses.
    ptx = check(rope_decode(dtype, shape), dtype, shape, spilled=SPILLED)
    assert "cp.async.cg.shared.global" in ptx
    # The first keys and values are asked for before the wait.
    before_the_wait, _, _ = ptx.partition("griddepcontrol.wait")
    assert before_the_wait.count("ld.global.v4") >= 2


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(("dtype", "shape"), VARIANTS)
def test_listed_decode(check: Callable[..., str], dtype: torch.dtype, shape: Shape) -> None:
    # Triton 3.6 spills a little of the largest tile; 3.9 does not.
    spilled = 16 if dtype == torch.float32 and shape[2] == 256 else 0
    ptx = check(listed_decode(dtype, shape), dtype, shape, spilled=spilled)
    assert "cp.async.cg.shared.global" in ptx
    assert "griddepcontrol.wait" in ptx
    assert "atom.global.gpu.acq_rel" in ptx


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(
    ("kind", "number", "spilled", "spilled_of_256"),
    [
        (prefill, SHORT_CONTEXT, 0, 104),
        (prefill, SHORT_CONTEXT + 1, 16, 104),
        (decode, 1, 0, 0),
        (decode, 2, 0, 0),
        (decode, SMALL, 96, 96),
        (listed_decode, 0, 0, 16),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])  # of GPT-OSS, Phi-3, Gemma 2 of 27B and of 9B
def test_soft_cap_and_sinks(
    check: Callable[..., str],
    head_dim: int,
    kind: Callable[..., Compilation],
    number: int,
    spilled: int,
    spilled_of_256: int,
) -> None:
    most, shape = spilled_of_256 if head_dim == 256 else spilled, (8, 4, head_dim)
    check(kind(torch.bfloat16, shape, number), torch.bfloat16, shape, spilled=most, cap_scale=0.0017)


def test_work_list(check: Callable[..., str]) -> None:
    sizes = {"QUERIES": 64, "MAX_SPLITS": MAX_LISTED_SPLITS, "TILE_K": 8}
    check(Compilation(list_kernel, sizes, num_warps=1), torch.bfloat16, (16, 8, 128))


@pytest.mark.parametrize(
    ("kind", "number", "dtype", "shape"),
    [
        (prefill, 0, *WIDE[0]),
        *(
            pytest.param(*case, *variant, marks=pytest.mark.product(one_in=1000))
            for case, variant in product(
                [(prefill, 0), (listed_decode, 0), (packed, 0), *((decode, programs) for programs in (1, SMALL))], WIDE
            )
            if (case, variant) != ((prefill, 0), WIDE[0])
        ),
    ],
)
def test_wide_heads(
    check: Callable[..., str], kind: Callable[..., Compilation], number: int, dtype: torch.dtype, shape: Shape
) -> None:
    """Nothing is spilled but an address."""
    ptx = check(kind(dtype, shape, number), dtype, shape, spilled=8 if kind is prefill else 0)
    assert ("cp.async.cg.shared.global" in ptx) == (dtype != torch.float32)


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("query_len", [4, 9])
@pytest.mark.parametrize(("dtype", "shape"), WIDE)
def test_drafts_of_wide_heads(check: Callable[..., str], dtype: torch.dtype, shape: Shape, query_len: int) -> None:
    check(decode(dtype, shape, 1, query_len), dtype, shape, spilled=8 if dtype == torch.bfloat16 else 0)


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(("dtype", "shape"), WIDE)
def test_images_of_wide_heads(check: Callable[..., str], dtype: torch.dtype, shape: Shape) -> None:
    # With a padded tail Triton 3.9 spills an address.
    check(prefill(dtype, shape, 0)._replace(images=True), dtype, shape, spilled=8 if shape[2] == 320 else 0)


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("head_dim", [64, 80, 256, 512, 576])
def test_combine(check: Callable[..., str], head_dim: int, query_len: int) -> None:
    part = min(WIDEST_PART, triton.next_power_of_2(head_dim))
    sizes = {"TILE_S": MAX_SPLITS, "QUERY_LEN": query_len, "TILE_Q": query_len, "TILE_D": part}
    ptx = check(Compilation(combine_kernel, sizes, num_warps=4), torch.bfloat16, (16, 8, head_dim))
    assert "ld.global.v4" in ptx


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(("num_kv_heads", "head_dim", "num_warps"), [(8, 128, 4), (4, 80, 1), (4, 512, 8)])
def test_write_kv(check: Callable[..., str], num_kv_heads: int, head_dim: int, num_warps: int) -> None:
    sizes = {"TILE_K": triton.next_power_of_2(num_kv_heads)}
    shape = num_kv_heads, num_kv_heads, head_dim
    ptx = check(Compilation(write_kv_kernel, sizes, num_warps), torch.bfloat16, shape)
    assert "ld.global.v4" in ptx
    assert "st.global.v4" in ptx


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("cache", [torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("head_dim", [80, 128, 576])
def test_decoded_contexts(check: Callable[..., str], head_dim: int, cache: torch.dtype) -> None:
    tile_d = triton.next_power_of_2(head_dim)
    sizes = {"WINDOW": 100, "TILE_H": TILE // tile_d, "TILE_D": tile_d}
    decoding = Compilation(decode_contexts_kernel, sizes, num_warps=4)
    ptx = check(decoding, torch.bfloat16, (16, 8, head_dim), cache=cache, spilled=8)
    assert "ld.global.v4" in ptx
    assert "st.global.v4" in ptx


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (partial(prefill, coded=True), SHORT_CONTEXT),
        (partial(prefill, coded=True), SHORT_CONTEXT + 1),
        *((decode, programs) for programs in (1, 2, SMALL)),
        (listed_decode, 0),
        (rope_decode, 0),
    ],
)
@pytest.mark.parametrize("cache", [torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("dtype", "shape"), VARIANTS)
def test_caches_of_8_bits(
    check: Callable[..., str],
    dtype: torch.dtype,
    shape: Shape,
    cache: torch.dtype,
    kind: Callable[..., Compilation],
    number: int,
) -> None:
    """Codes become numbers in registers, which may spill a little."""
    spilled = 2 * SPILLED if kind is rope_decode else SPILLED
    check(kind(dtype, shape, number), dtype, shape, spilled=spilled, cache=cache)


@pytest.mark.product(one_in=1000)
@pytest.mark.parametrize("of", [partial(prefill, max_seq_len=0), partial(decode, programs=1), listed_decode])
@pytest.mark.parametrize("cache", [torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("dtype", "shape"), WIDE)
def test_wide_heads_in_caches_of_8_bits(
    check: Callable[..., str], of: Callable[..., Compilation], dtype: torch.dtype, shape: Shape, cache: torch.dtype
) -> None:
    check(of(dtype, shape), dtype, shape, spilled=8, cache=cache)
