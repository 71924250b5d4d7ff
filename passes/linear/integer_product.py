"""Triton kernels of linears whose weight has integer codes of four or 8 bits, or codes of e2m1; inputs are not rounded.

With few tokens, a linear takes as long as reading its weight, so one kernel decodes the codes in registers before the
tensor cores multiply them. With many tokens, the multiplications dominate: another kernel decodes the whole weight to
memory, and torch's linear multiplies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.linear.quantised_product import LEAST_COLUMNS, MOST_COLUMNS, Tiles, step_of, store_outputs
from compiled_engine.passes.linear.small_batch_linear_tiles import weight_rows
from compiled_engine.quantisation import LinearScheme

# Element formats of the weights. Kernels read formats with zero points like their counterparts without.
ELEMENTS = ("int4", "uint4", "int8", "uint8", "e2m1")
# Columns of the smallest tiles, smaller than a tensor-core product: those of NVFP4.
FINE_COLUMNS = 16
# The first compute capability with products of bfloat16.
CAPABILITY = (8, 0)
# Most tokens of the kernel that decodes in registers. With more, it is faster to decode the whole weight first.
MOST_TOKENS = 64
# Bits of 128 in bfloat16, of 1024 in float16, and of 2^23 in float32.
BITS_OF_128, BITS_OF_1024, BITS_OF_2_23 = tl.constexpr(0x4300), tl.constexpr(0x6400), tl.constexpr(0x4B000000)
# The code of 0 in formats without zero points, as kernels read codes: those of int8 plus 128.
_ZEROS = {"int4": 8, "int8": 128}
# Rows and bytes of a program of the kernel that decodes a weight.
_DECODED_ROWS, _DECODED_BYTES = 4, 512
# Rows of a program that decodes words.
_WORD_ROWS = 64


@triton.jit
def _values(codes: tl.tensor, zeros: tl.tensor, ELEMENT: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """Return integer codes minus zero points, or the values of e2m1 codes, exactly, in the floating-point `dtype`.

    e2m1 (four-bit floats): the code's bits, put into a float16, are the value times 2^-14, so they are multiplied by
    2^14. Integers: to avoid a slow conversion, the code is put into the lowest bits of a number whose last bit stands
    for 1: 128 in bfloat16, 1024 in float16, 2^23 in float32. The result is the number plus the code; subtracting the
    number plus the zero point leaves the value. Codes of 8 bits do not fit into 128 in bfloat16, so 2^23 is taken.
    """
    if ELEMENT == "e2m1":
        bits = (codes & 7).to(tl.int16) << 9 | (codes & 8).to(tl.int16) << 12
        return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0).to(dtype)
    elif dtype == tl.float32 or (ELEMENT == "int8" and dtype == tl.bfloat16):
        values = (codes.to(tl.int32) | BITS_OF_2_23).to(tl.float32, bitcast=True)
        return (values - (zeros.to(tl.int32) | BITS_OF_2_23).to(tl.float32, bitcast=True)).to(dtype)
    else:
        BITS: tl.constexpr = BITS_OF_128 if dtype == tl.bfloat16 else BITS_OF_1024
        values = (codes.to(tl.int16) | BITS).to(dtype, bitcast=True)
        return values - (zeros.to(tl.int16) | BITS).to(dtype, bitcast=True)


@triton.jit
def _scaled(
    codes: tl.tensor, zeros: tl.tensor, scales: tl.tensor, ELEMENT: tl.constexpr, dtype: tl.constexpr
) -> tl.tensor:
    """Return the values of codes, see `_values`, times their scales, in `dtype`. scales: None: do not multiply."""
    if scales is None:
        return _values(codes, zeros, ELEMENT, dtype)
    else:
        return (_values(codes, zeros, ELEMENT, tl.float32) * scales).to(dtype)


@triton.jit
def _unsigned(codes: tl.tensor) -> tl.tensor:
    """Return codes as unsigned numbers: int8 codes plus 128, all others unchanged."""
    if codes.dtype == tl.int8:
        return codes.to(tl.uint8, bitcast=True) ^ 128
    else:
        return codes


@triton.jit
def _of_tiles(
    ptr: tl.tensor,
    first_N: tl.tensor,
    tile: tl.tensor,
    ROW_TILES: tl.constexpr,
    TILES: tl.constexpr,
    BYTES: tl.constexpr,
) -> tl.tensor:
    """Load the scales, or the zero points, of N rows of codes in one step along the columns.

    A step has BYTES bytes of each row, and TILES quantisation tiles, which share a scale, from tile number `tile` on.
    Returns [N, 1] if TILES is 1, otherwise one value for each byte, [N, BYTES]. ptr: the values of all tiles. first_N:
    index of the value of each row's first tile. ROW_TILES: tiles of a whole row.
    """
    if TILES == 1:
        return tl.load(ptr + first_N + tile)[:, None]
    else:
        tile_G = tile + tl.arange(0, TILES)
        values_NG = tl.load(ptr + first_N[:, None] + tile_G[None, :], mask=(tile_G < ROW_TILES)[None, :], other=0)
        ROWS: tl.constexpr = first_N.shape[0]
        return tl.reshape(tl.broadcast_to(values_NG[:, :, None], [ROWS, TILES, BYTES // TILES]), [ROWS, BYTES])


@quick_launches
@triton.jit(do_not_specialize=["num_outputs", "num_tokens"])
def integer_product_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_outputs: tl.tensor,
    num_tokens: tl.tensor,
    x_stride: tl.tensor,
    K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    ELEMENT: tl.constexpr,
    ZERO: tl.constexpr,
    SILU_MUL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Compute a quantised linear with the activation and the residual add after it; see quantised_linear_op.reference.

    Program (rows, tokens) multiplies TOKENS tokens by ROWS rows of the weight.

    x_ptr: [num_tokens, K]. codes_ptr: [N, K], or for four-bit codes [N, K / 2]; the low half of a byte has the code of
        the even column. ELEMENT: the codes' format, "int8", "int4" or "e2m1"; unsigned codes count as signed ones.
    scales_ptr, zeros_ptr: one value for each tile of TILE_ROWS x TILE_COLUMNS elements; TILE_COLUMNS is K for whole
        rows. zeros_ptr: None if the zero point of all codes is ZERO.
    out_ptr, residual_ptr: [num_tokens, num_outputs]. bias_ptr: [N]. bias_ptr and residual_ptr may be None.

    Each step multiplies BLOCK_K columns. If tiles have at least as many columns, the scales multiply the step's sum.
    Scales of smaller tiles multiply the weight's values, which are then rounded to the dtype of x.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    PER_BYTE: tl.constexpr = 1 if ELEMENT == "int8" else 2
    BYTES: tl.constexpr = BLOCK_K // PER_BYTE
    ROW_BYTES: tl.constexpr = K // PER_BYTE
    ROW_TILES: tl.constexpr = (K + TILE_COLUMNS - 1) // TILE_COLUMNS
    FINE: tl.constexpr = TILE_COLUMNS < K and TILE_COLUMNS < BLOCK_K
    TILES: tl.constexpr = BLOCK_K // TILE_COLUMNS if FINE else 1
    OUTPUTS: tl.constexpr = ROWS // 2 if SILU_MUL else ROWS
    first = tl.program_id(0) * OUTPUTS
    row_N = weight_rows(first, num_outputs, ROWS, SILU_MUL)
    token_T = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    mask_T = token_T < num_tokens
    column_K, byte_B = tl.arange(0, BLOCK_K), tl.arange(0, BYTES)
    codes_ptr_NB = codes_ptr + row_N.to(tl.int64)[:, None] * ROW_BYTES + byte_B[None, :]
    x_ptr_TK = x_ptr + token_T.to(tl.int64)[:, None] * x_stride + column_K[None, :]
    tile_N = row_N // TILE_ROWS * ROW_TILES
    if DEPENDENT_LAUNCH:
        gdc_wait()
    acc_NT = tl.zeros([ROWS, TOKENS], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        if K % BLOCK_K == 0:
            codes_NB = tl.load(codes_ptr_NB + k // PER_BYTE, eviction_policy="evict_first")
            x_TK = tl.load(x_ptr_TK + k, mask=mask_T[:, None], other=0.0)
        else:
            mask_B = k // PER_BYTE + byte_B < ROW_BYTES
            codes_NB = tl.load(codes_ptr_NB + k // PER_BYTE, mask=mask_B[None, :], other=0)
            x_TK = tl.load(x_ptr_TK + k, mask=mask_T[:, None] & (k + column_K < K)[None, :], other=0.0)
        scale_NB = _of_tiles(scales_ptr, tile_N, k // TILE_COLUMNS, ROW_TILES, TILES, BYTES)
        if zeros_ptr is None:
            zero_NB = tl.full([1, 1], ZERO, tl.uint8)
        else:
            zero_NB = _of_tiles(zeros_ptr, tile_N, k // TILE_COLUMNS, ROW_TILES, TILES, BYTES)
        own_NB = scale_NB if FINE else None
        if PER_BYTE == 1:
            w_NK = _scaled(_unsigned(codes_NB), zero_NB, own_NB, ELEMENT, dtype)
            product_NT = tl.dot(w_NK, tl.trans(x_TK), input_precision="ieee")
        else:
            even_TB, odd_TB = tl.split(tl.reshape(x_TK, [TOKENS, BYTES, 2]))
            even_NB = _scaled(codes_NB & 15, zero_NB, own_NB, ELEMENT, dtype)
            product_NT = tl.dot(even_NB, tl.trans(even_TB), input_precision="ieee")
            odd_NB = _scaled(codes_NB >> 4, zero_NB, own_NB, ELEMENT, dtype)
            product_NT = tl.dot(odd_NB, tl.trans(odd_TB), product_NT, input_precision="ieee")
        acc_NT += product_NT if FINE else product_NT * scale_NB
    y_TN = tl.trans(acc_NT)
    store_outputs(y_TN, first, num_outputs, token_T, mask_T, bias_ptr, residual_ptr, out_ptr, SILU_MUL, ACTIVATION)


@quick_launches
@triton.jit(do_not_specialize=["num_rows"])
def decode_kernel(
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    ELEMENT: tl.constexpr,
    ZERO: tl.constexpr,
    ROWS: tl.constexpr,
    BYTES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Decode a quantised weight to out, [num_rows, K]. Program (rows, columns) decodes BYTES bytes of ROWS rows.

    For the arguments see integer_product_kernel.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    row_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    byte_B = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    PER_BYTE: tl.constexpr = 1 if ELEMENT == "int8" else 2
    ROW_BYTES: tl.constexpr = K // PER_BYTE
    mask_NB = (row_N < num_rows)[:, None] & (byte_B < ROW_BYTES)[None, :]
    codes_NB = tl.load(codes_ptr + row_N.to(tl.int64)[:, None] * ROW_BYTES + byte_B[None, :], mask=mask_NB, other=0)
    tile_NB = (row_N // TILE_ROWS * ((K + TILE_COLUMNS - 1) // TILE_COLUMNS))[:, None]
    tile_NB += (byte_B // (TILE_COLUMNS // PER_BYTE))[None, :]
    scale_NB = tl.load(scales_ptr + tile_NB, mask=mask_NB, other=0.0)
    if zeros_ptr is None:
        zero_NB = tl.full([1, 1], ZERO, tl.uint8)
    else:
        zero_NB = tl.load(zeros_ptr + tile_NB, mask=mask_NB, other=0)
    if PER_BYTE == 1:
        w_NK = _scaled(_unsigned(codes_NB), zero_NB, scale_NB, ELEMENT, tl.float32)
    else:
        even_NB = _scaled(codes_NB & 15, zero_NB, scale_NB, ELEMENT, tl.float32)
        w_NK = tl.interleave(even_NB, _scaled(codes_NB >> 4, zero_NB, scale_NB, ELEMENT, tl.float32))
    column_K = tl.program_id(1) * (PER_BYTE * BYTES) + tl.arange(0, PER_BYTE * BYTES)
    mask_NK = (row_N < num_rows)[:, None] & (column_K < K)[None, :]
    out_ptr_NK = out_ptr + row_N.to(tl.int64)[:, None] * K + column_K[None, :]
    tl.store(out_ptr_NK, w_NK.to(out_ptr.dtype.element_ty), mask=mask_NK)


@quick_launches
@triton.jit(do_not_specialize=["num_rows"])
def decode_words_kernel(
    words_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    K: tl.constexpr,
    ZERO: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Decode a weight of four-bit codes in words, see rounding.to_words. Program (rows, block of 128 columns).

    A program decodes ROWS rows.

    words_ptr: [num_rows, K / 8]. scales_ptr, zeros_ptr: [K / 128, num_rows]. out_ptr: [num_rows, K].
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    row_N, block = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    mask_N = row_N < num_rows
    word_W = tl.arange(0, 16)
    offsets_NW = row_N.to(tl.int64)[:, None] * (K // 8) + block * 16 + word_W[None, :]
    words_NW = tl.load(words_ptr + offsets_NW, mask=mask_N[:, None], other=0)
    scale_N = tl.load(scales_ptr + block * num_rows + row_N, mask=mask_N, other=0.0)
    if zeros_ptr is None:
        zero_N = tl.full([ROWS], ZERO, tl.int16)
    else:
        zero_N = tl.load(zeros_ptr + block * num_rows + row_N, mask=mask_N, other=0)
    out_ptr_NW = out_ptr + row_N.to(tl.int64)[:, None] * K + block * 128 + word_W[None, :]
    for i in tl.static_range(8):
        values_NW = _values((words_NW >> (4 * i)) & 15, zero_N[:, None], "int4", tl.float32) * scale_N[:, None]
        tl.store(out_ptr_NW + 16 * i, values_NW.to(out_ptr.dtype.element_ty), mask=mask_N[:, None])


def why_not_by_kernels(capability: tuple[int, int], scheme: LinearScheme) -> str | None:
    """Return why this module's kernels do not support a linear, so that torch's ops compute it; None if they do."""
    if capability < CAPABILITY:
        return f"the GPU's compute capability {capability[0]}.{capability[1]} has no products of bfloat16"
    if not columns_of_step(scheme):
        return f"its scales are of columns that are no multiple of {LEAST_COLUMNS} ({scheme})"
    return None


def columns_of_step(scheme: LinearScheme) -> int:
    """Return the number of columns that a kernel multiplies per step; 0 if the kernels do not support the scheme.

    If scales belong to tiles of FINE_COLUMNS columns, a step has several tiles; otherwise see step_of.
    """
    return MOST_COLUMNS if scheme.weight.columns == FINE_COLUMNS else step_of(scheme)


def choose_tiles(num_tokens: int, num_rows: int) -> Tiles:
    """Return the tile sizes for a linear of `num_tokens` tokens and a weight of `num_rows` rows, by a rule."""
    tokens = min(MOST_TOKENS, max(16, next_power_of_2(num_tokens)))
    return Tiles(tokens, 32 if num_rows <= 8192 else 64, 8 if tokens == MOST_TOKENS else 4, 4)


def launch(
    x_TK: torch.Tensor,
    codes_NB: torch.Tensor,
    scales_RC: torch.Tensor,
    zeros_RC: torch.Tensor | None,
    bias_N: torch.Tensor | None,
    residual_TM: torch.Tensor | None,
    silu_mul: bool,
    activation: str,
    scheme: LinearScheme,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Return a linear with bias, activation and residual, as given: [T, N], or [T, N / 2] with silu_mul, in x's dtype.

    See quantised_linear_op.reference for the arguments. The weight must be contiguous. tiles: if None, those of
    choose_tiles.
    """
    if residual_TM is not None and not residual_TM.is_contiguous():
        residual_TM = residual_TM.contiguous()
    (num_tokens, k), num_rows, rounding = x_TK.shape, codes_NB.shape[0], scheme.weight
    if tiles is None:
        tiles = choose_tiles(num_tokens, num_rows)
    outputs = num_rows // 2 if silu_mul else num_rows
    out_TM = torch.empty((num_tokens, outputs), dtype=x_TK.dtype, device=x_TK.device)
    integer_product_kernel[(cdiv(num_rows, tiles.rows), cdiv(num_tokens, tiles.tokens))](
        x_TK,
        codes_NB,
        scales_RC,
        zeros_RC,
        bias_N,
        residual_TM,
        out_TM,
        outputs,
        num_tokens,
        x_TK.stride(0),
        K=k,
        TILE_ROWS=rounding.rows or num_rows,
        TILE_COLUMNS=rounding.columns or k,
        ELEMENT=rounding.element.removeprefix("u"),
        ZERO=_ZEROS.get(rounding.element, 0),
        SILU_MUL=silu_mul,
        ACTIVATION=activation,
        TOKENS=tiles.tokens,
        ROWS=tiles.rows,
        BLOCK_K=columns_of_step(scheme),
        NUM_STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
        enable_fp_fusion=True,
        **dependent_launch(x_TK.device),
    )
    return out_TM


def decode_words(
    words: torch.Tensor, scales_CN: torch.Tensor, zeros_CN: torch.Tensor | None, zero: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weight's values [N, K], computed in fp32 and rounded to `dtype`.

    words, scales_CN, zeros_CN: the quantised weight in the layout of hopper_integers. `decode_weight` does the same for
    the other layout. zero: the zero point of all codes if zeros_CN is None.
    """
    num_rows, k = words.shape[0], words.shape[1] * 8
    out_NK = torch.empty((num_rows, k), dtype=dtype, device=words.device)
    decode_words_kernel[(cdiv(num_rows, _WORD_ROWS), k // 128)](
        words,
        scales_CN,
        zeros_CN,
        out_NK,
        num_rows,
        K=k,
        ZERO=zero,
        ROWS=_WORD_ROWS,
        **dependent_launch(words.device),
    )
    return out_NK


def decode_weight(
    codes_NB: torch.Tensor,
    scales_RC: torch.Tensor,
    zeros_RC: torch.Tensor | None,
    scheme: LinearScheme,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the weight's values [N, K], computed in fp32 and rounded to `dtype`.

    The two columns whose codes share a byte must have the same scale.
    """
    (num_rows, num_bytes), rounding = codes_NB.shape, scheme.weight
    per_byte = rounding.format.per_byte
    out_NK = torch.empty((num_rows, per_byte * num_bytes), dtype=dtype, device=codes_NB.device)
    decode_kernel[(cdiv(num_rows, _DECODED_ROWS), cdiv(num_bytes, _DECODED_BYTES))](
        codes_NB,
        scales_RC,
        zeros_RC,
        out_NK,
        num_rows,
        K=per_byte * num_bytes,
        TILE_ROWS=rounding.rows or num_rows,
        TILE_COLUMNS=rounding.columns or per_byte * num_bytes,
        ELEMENT=rounding.element.removeprefix("u"),
        ZERO=_ZEROS.get(rounding.element, 0),
        ROWS=_DECODED_ROWS,
        BYTES=_DECODED_BYTES,
        **dependent_launch(codes_NB.device),
    )
    return out_NK
