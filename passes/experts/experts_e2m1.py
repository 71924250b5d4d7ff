"""Kernels for the experts of few tokens in e2m1 (MXFP4, NVFP4): routing, then products without tensor cores.

Each token computes its own experts, so tokens with a common expert decode it several times. A thread reads 16 bytes of
codes at once, words of eight codes each, and multiplies in fp32. Inputs are in the order of the words, see `place_of`,
so that neighbouring threads read neighbouring inputs.

Shifts and masks decode two codes of a word to two halves in bfloat16, see pair_of. Each half becomes a number in fp32.
Inputs are multiplied by INPUTS, which keeps products normal.

A pair is a token and one of its TOP_K experts. Pair number token * TOP_K + slot has the token's expert number `slot`.
W is the number of words of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.experts.experts_gate import gate_of_experts
from compiled_engine.passes.experts.experts_packed import pair_of, scale_of
from compiled_engine.passes.experts.experts_routing import chosen_experts
from compiled_engine.passes.experts.experts_words import operand_place
from compiled_engine.passes.linear.small_batch_linear_tiles import _ask_into_l2 as ask_into_l2
from compiled_engine.passes.norm.rms_norm import normed

# Factor of stored inputs, and again of results. With the factor 2^62 of scale_of it undoes the 2^-126 of pair_of.
INPUTS = tl.constexpr(2.0**32)


@triton.jit
def place_of(column: tl.tensor, K: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """Return the place of a column's input among a token's K inputs, which are stored as [8, W].

    The first index is the number of a code within its word, the second is the word. The codes of a word are numbered by
    its bytes: first those in the bytes' low bits, then those in the high bits. UNIT: columns of a unit, see
    rounding.in_halves.
    """
    HALF: tl.constexpr = UNIT // 2
    byte = column // UNIT * HALF + column % HALF
    code = column % UNIT // HALF * 4 + byte % 4
    return code * (K // 8) + byte // 4


@quick_launches
@triton.jit(do_not_specialize=["x_stride", "logits_stride", "eps"])
def prepare_kernel(
    x_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    given_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    inputs_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    rank_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    x_stride: tl.tensor,
    logits_stride: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UNIT: tl.constexpr,
    PADDED: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Choose a token's experts, normalise its inputs, and write these in the next product's order: program (token).

    x_ptr: [T, K], logits_ptr: [T, NUM_EXPERTS] or with given_ptr the weights of the given experts [T, TOP_K]; rows
        x_stride and logits_stride apart.
    given_ptr: [T, TOP_K], experts that are chosen already, or None. norm_weight_ptr: [K], or None for no norm.
    inputs_ptr: float32 [T, 8, W], times INPUTS; with PADDED [T, PADDED] in the order of operand_place, then zeros.
    chosen_ptr: int32 [T, TOP_K]; weights_ptr: float32 [T, TOP_K].
    rank_ptr, counts_ptr: see route_kernel; None if pairs are not sorted.
    OFFSET, WIDE: see `normed`. BLOCK_K, BLOCK_E: K or PADDED, and NUM_EXPERTS, rounded up to powers of two.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    BLOCK_X: tl.constexpr = triton.next_power_of_2(TOP_K)
    x_X = tl.arange(0, BLOCK_X)
    mask_X = x_X < TOP_K
    if given_ptr is None:
        of_token_ptr = logits_ptr + token * logits_stride
        expert_X, weight_X = chosen_experts(of_token_ptr, NUM_EXPERTS, BLOCK_E, TOP_K, BLOCK_X, RENORMALISE)
    else:
        expert_X = tl.load(given_ptr + token * TOP_K + x_X, mask=mask_X, other=0).to(tl.int32)
        weight_X = tl.load(logits_ptr + token * logits_stride + x_X, mask=mask_X, other=0.0).to(tl.float32)
    tl.store(chosen_ptr + token * TOP_K + x_X, expert_X, mask=mask_X)
    tl.store(weights_ptr + token * TOP_K + x_X, weight_X, mask=mask_X)
    if rank_ptr is not None:
        rank_X = tl.atomic_add(counts_ptr + expert_X, 1, mask=mask_X, sem="relaxed")
        tl.store(rank_ptr + token * TOP_K + x_X, rank_X, mask=mask_X)

    column_K = tl.arange(0, BLOCK_K)
    mask_K = column_K < K
    x_K = tl.load(x_ptr + token * x_stride + column_K, mask=mask_K, other=0.0).to(tl.float32)
    if norm_weight_ptr is not None:
        norm_weight_K = tl.load(norm_weight_ptr + column_K, mask=mask_K, other=0.0).to(tl.float32)
        x_K = normed(x_K, norm_weight_K, eps, K, OFFSET, WIDE, x_ptr.dtype.element_ty).to(tl.float32)
    if PADDED > 0:
        x_K = x_K.to(inputs_ptr.dtype.element_ty)
        tl.store(inputs_ptr + token * PADDED + operand_place(column_K, UNIT), x_K, mask=column_K < PADDED)
    else:
        tl.store(inputs_ptr + token * K + place_of(column_K, K, UNIT), x_K * INPUTS, mask=mask_K)


@triton.jit
def _factors(
    ptr_R1: tl.tensor,
    mask_R1: tl.tensor,
    k: tl.tensor,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    SCALES: tl.constexpr,
) -> tl.tensor:
    """Return the scales of words k to k + BLOCK_W, each a word of eight codes, times 2^62: fp32 [R, BLOCK_W].

    ptr_R1: each row's first scale, a byte for each TILE_COLUMNS columns, in the format SCALES; mask_R1: whether the row
    exists.
    """
    WORDS: tl.constexpr = TILE_COLUMNS // 8
    TILES: tl.constexpr = BLOCK_W // WORDS
    R: tl.constexpr = ptr_R1.shape[0]
    tile_1C = k // WORDS + tl.arange(0, TILES)[None, :]
    stored_RC = tl.load(ptr_R1 + tile_1C, mask=mask_R1 & (tile_1C * WORDS < W), other=0).to(tl.uint32)
    factor_RC = scale_of(stored_RC, SCALES)
    return tl.reshape(tl.broadcast_to(factor_RC[:, :, None], [R, TILES, WORDS]), [R, BLOCK_W])


@triton.jit
def _inputs(
    ptr_X1: tl.tensor, code: tl.constexpr, k: tl.tensor, W: tl.constexpr, R: tl.constexpr, BLOCK_W: tl.constexpr
) -> tl.tensor:
    """Return the inputs for code number `code` of words k to k + BLOCK_W, fp32 [R, BLOCK_W], or [1, BLOCK_W] if X is 1.

    ptr_X1: pointers to X sets of inputs, [8, W] each. Row r of the R rows takes set r % X.
    """
    X: tl.constexpr = ptr_X1.shape[0]
    word_1W = k + tl.arange(0, BLOCK_W)[None, :]
    inputs_XW = tl.load(ptr_X1 + code * W + word_1W, mask=word_1W < W, other=0.0)
    if X == 1:
        return inputs_XW
    else:
        return tl.reshape(tl.broadcast_to(inputs_XW[None, :, :], [R // X, X, BLOCK_W]), [R, BLOCK_W])


@triton.jit
def _plus_codes(total: tl.tensor, words: tl.tensor, n: tl.constexpr, first: tl.tensor, last: tl.tensor) -> tl.tensor:
    """Return `total` plus the products of two codes of each word: code n of the word's low and of its high 16 bits.

    The code of the low bits is multiplied by `first`, that of the high bits by `last`. The words are uint32. The other
    arguments are fp32, in shapes that broadcast to that of the words.
    """
    pair = pair_of(words, n)
    total += (pair << 16).to(tl.float32, bitcast=True) * first
    return total + (pair & 0xFFFF0000).to(tl.float32, bitcast=True) * last


@triton.jit
def _product(
    words_ptr_R1: tl.tensor,
    scales_ptr_R1: tl.tensor,
    inputs_ptr_X1: tl.tensor,
    mask_R1: tl.tensor,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    SCALES: tl.constexpr,
) -> tl.tensor:
    """Return the scalar product of each of R rows of codes with its inputs, fp32 [R].

    words_ptr_R1, scales_ptr_R1: each row's first word and scale; mask_R1: whether the row exists. inputs_ptr_X1: see
    _inputs.
    """
    R: tl.constexpr = words_ptr_R1.shape[0]
    acc_RW = tl.zeros([R, BLOCK_W], tl.float32)
    for k in tl.range(0, W, BLOCK_W):
        word_1W = k + tl.arange(0, BLOCK_W)[None, :]
        mask_RW = mask_R1 & (word_1W < W)
        words_RW = tl.load(words_ptr_R1 + word_1W, mask=mask_RW, other=0, eviction_policy="evict_first")
        words_RW = words_RW.to(tl.uint32, bitcast=True)
        factors_RW = _factors(scales_ptr_R1, mask_R1, k, W, BLOCK_W, TILE_COLUMNS, SCALES)
        sum_RW = tl.zeros_like(acc_RW)
        for n in tl.static_range(4):
            # Codes in the low bits of bytes come before those in the high bits.
            first_RW = _inputs(inputs_ptr_X1, n % 2 * 4 + n // 2, k, W, R, BLOCK_W)
            last_RW = _inputs(inputs_ptr_X1, n % 2 * 4 + n // 2 + 2, k, W, R, BLOCK_W)
            sum_RW = _plus_codes(sum_RW, words_RW, n, first_RW, last_RW)
        acc_RW += sum_RW * factors_RW
    return tl.sum(acc_RW, 1) * INPUTS


@quick_launches
@triton.jit
def gate_up_words_kernel(
    inputs_ptr: tl.tensor,
    gate_up_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    row_scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    out_ptr: tl.tensor,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    SCALES: tl.constexpr,
    UNIT: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Compute the first linear of a pair and the gate: program (rows, pair) computes ROWS outputs.

    inputs_ptr: float32 [T, 8, W], from prepare_kernel. gate_up_ptr: codes uint8 [E, 2 * WIDTH, K / 2], aligned to four
        bytes; scales_ptr: uint8 [E, 2 * WIDTH, K / TILE_COLUMNS], in the format SCALES; row_scales_ptr: float32
        [E, 2 * WIDTH], factors of the rows' products, or None; bias_ptr: [E, 2 * WIDTH] or None.
    hidden_ptr: float32 [pairs, 8, WIDTH / 8], the results times INPUTS, in the order of place_of with UNIT.
    chosen_ptr: int32 [pairs], the experts. out_ptr: not accessed; results are rounded to its dtype.
    ACTIVATION, ALPHA, LIMIT, INTERLEAVED: see by_token_gate_up_kernel.
    """
    if DEPENDENT_LAUNCH:
        gdc_wait()
        # Not earlier: the next kernel reads the chosen experts before it waits for this one.
        gdc_launch_dependents()
    pair = tl.program_id(1)
    expert = tl.load(chosen_ptr + pair).to(tl.int64)
    TILES: tl.constexpr = (K + TILE_COLUMNS - 1) // TILE_COLUMNS
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    APART: tl.constexpr = 1 if INTERLEAVED else WIDTH
    output_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask_N = output_N < WIDTH
    # Each output's row of gate comes before its row of up.
    part_R = tl.arange(0, 2 * ROWS)
    output_R = tl.program_id(0) * ROWS + part_R // 2
    row_R1 = (STEP * output_R + APART * (part_R % 2))[:, None]
    words_ptr = (gate_up_ptr + expert * (2 * WIDTH * (K // 2))).to(tl.pointer_type(tl.int32))
    y_R = _product(
        words_ptr + row_R1 * (K // 8),
        scales_ptr + expert * (2 * WIDTH * TILES) + row_R1 * TILES,
        inputs_ptr + pair // TOP_K * K + tl.zeros([1, 1], tl.int32),
        (output_R < WIDTH)[:, None],
        K // 8,
        BLOCK_W,
        TILE_COLUMNS,
        SCALES,
    )
    if row_scales_ptr is not None:
        row_scales_ptrs_R = row_scales_ptr + expert * (2 * WIDTH) + tl.reshape(row_R1, [2 * ROWS])
        y_R *= tl.load(row_scales_ptrs_R, mask=output_R < WIDTH, other=0.0)
    gate_N, up_N = tl.split(tl.reshape(y_R, [ROWS, 2]))
    if bias_ptr is not None:
        bias_ptrs_N = bias_ptr + expert * (2 * WIDTH) + STEP * output_N
        gate_N += tl.load(bias_ptrs_N, mask=mask_N, other=0.0).to(tl.float32)
        up_N += tl.load(bias_ptrs_N + APART, mask=mask_N, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    gate_N = gate_N.to(dtype).to(tl.float32)
    up_N = up_N.to(dtype).to(tl.float32)
    hidden_N = gate_of_experts(gate_N, up_N, ACTIVATION, ALPHA, LIMIT, dtype).to(dtype).to(tl.float32)
    tl.store(hidden_ptr + pair * WIDTH + place_of(output_N, WIDTH, UNIT), hidden_N * INPUTS, mask=mask_N)


@quick_launches
@triton.jit
def down_words_kernel(
    hidden_ptr: tl.tensor,
    down_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    row_scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    HIDDEN_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    SCALES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Compute the second linear of a token's experts: program (rows, token) has ROWS outputs, summed over the experts.

    hidden_ptr: float32 [T, TOP_K, 8, W], from gate_up_words_kernel. down_ptr: codes uint8 [E, HIDDEN_SIZE, WIDTH / 2],
        aligned to four bytes; scales_ptr, row_scales_ptr, bias_ptr: as in gate_up_words_kernel, with HIDDEN_SIZE rows.
    chosen_ptr, weights_ptr: [T, TOP_K], the experts and their weights in the sum.
    residual_ptr: [T, HIDDEN_SIZE], added to the sum, or None; out_ptr: [T, HIDDEN_SIZE].
    """
    TILES: tl.constexpr = (WIDTH + TILE_COLUMNS - 1) // TILE_COLUMNS
    token = tl.program_id(1)
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        if WIDTH % 32 == 0:
            start = tl.program_id(0) * ROWS
            num_bytes = tl.minimum(ROWS, HIDDEN_SIZE - start) * (WIDTH // 2)
            for slot in tl.static_range(TOP_K):
                row = tl.load(chosen_ptr + token * TOP_K + slot).to(tl.int64) * HIDDEN_SIZE + start
                ask_into_l2(down_ptr + row * (WIDTH // 2), num_bytes)
        gdc_wait()
    # Rows of the experts alternate, so that each warp has those of an expert.
    part_R = tl.arange(0, ROWS * BLOCK_X)
    row_R = tl.program_id(0) * ROWS + part_R // BLOCK_X
    slot_R = part_R % BLOCK_X
    mask_R = (row_R < HIDDEN_SIZE) & (slot_R < TOP_K)
    pair_R = token * TOP_K + tl.minimum(slot_R, TOP_K - 1)
    expert_row_R = tl.load(chosen_ptr + pair_R).to(tl.int64) * HIDDEN_SIZE + row_R
    pair_X = token * TOP_K + tl.minimum(tl.arange(0, BLOCK_X), TOP_K - 1)
    y_R = _product(
        down_ptr.to(tl.pointer_type(tl.int32)) + expert_row_R[:, None] * (WIDTH // 8),
        scales_ptr + expert_row_R[:, None] * TILES,
        hidden_ptr + pair_X[:, None] * WIDTH,
        mask_R[:, None],
        WIDTH // 8,
        BLOCK_W,
        TILE_COLUMNS,
        SCALES,
    )
    if row_scales_ptr is not None:
        y_R *= tl.load(row_scales_ptr + expert_row_R, mask=mask_R, other=0.0)
    if bias_ptr is not None:
        y_R += tl.load(bias_ptr + expert_row_R, mask=mask_R, other=0.0).to(tl.float32)
    y_R *= tl.load(weights_ptr + pair_R)
    y_N = tl.sum(tl.reshape(y_R, [ROWS, BLOCK_X]), 1)
    row_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask_N = row_N < HIDDEN_SIZE
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out_ptrs_N = token.to(tl.int64) * HIDDEN_SIZE + row_N
    if residual_ptr is not None:
        residual_N = tl.load(residual_ptr + out_ptrs_N, mask=mask_N, other=0.0)
        y_N = y_N.to(dtype).to(tl.float32) + residual_N.to(tl.float32)
    tl.store(out_ptr + out_ptrs_N, y_N.to(dtype), mask=mask_N)


@dataclass(frozen=True)
class WordTiles:
    """The outputs of a program, the words of a row that it multiplies at a time, and its warps."""

    rows: int
    block_w: int
    num_warps: int


def word_tiles(num_columns: int, num_experts: int = 1) -> WordTiles:
    """Return tiles for a weight with this many columns. num_experts: experts that a program reads, a power of two.

    A warp reads 128 words of a row at once, 16 bytes a thread. The rows of a warp share the inputs that it loads. These
    are four rows of gate and four of up. In the second linear each of the token's experts has a warp, with four rows.
    """
    return WordTiles(rows=4, block_w=min(128, next_power_of_2(num_columns // 8)), num_warps=min(num_experts, 8))


class Codes(NamedTuple):
    """A weight of all experts in e2m1."""

    codes_ENB: torch.Tensor  # uint8, two codes to a byte in the order of rounding.in_halves
    scales_ENC: torch.Tensor  # uint8
    row_scales_ER1: torch.Tensor | None  # factors of the rows' products, fp32
    bias_EN: torch.Tensor | None
    tile_columns: int  # columns that share a scale
    unit: int  # columns of a unit, see rounding.in_halves
    scales: str  # the format of the scales, see experts_codes.constants_of

    @property
    def num_columns(self) -> int:
        return 2 * self.codes_ENB.shape[2]


def prepare(
    x_TD: torch.Tensor,
    logits_TE: torch.Tensor,
    given_TX: torch.Tensor | None,
    norm: tuple[torch.Tensor | None, float, float, bool],
    out: tuple[torch.Tensor | None, ...],
    route: dict[str, Any],
    unit: int,
    padded: int = 0,
) -> None:
    """Launch prepare_kernel.

    out: the tensors that the kernel writes: inputs, chosen experts, their weights, ranks and counts. unit: columns of a
    unit of the first weight's codes. padded: the kernel's PADDED; 0 for the order of words. For the other arguments see
    `launch`.
    """
    hidden_size = x_TD.shape[1]
    norm_weight_D, eps, norm_offset, norm_wide = norm
    prepare_kernel[(x_TD.shape[0],)](
        x_TD,
        logits_TE,
        given_TX,
        norm_weight_D,
        *out,
        x_TD.stride(0),
        logits_TE.stride(0),
        eps,
        K=hidden_size,
        BLOCK_K=next_power_of_2(padded or hidden_size),
        UNIT=unit,
        PADDED=padded,
        OFFSET=norm_offset,
        WIDE=norm_wide,
        num_warps=8,
        **route,
        **dependent_launch(x_TD.device),
    )


def launch(
    x_TD: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up: Codes,
    down: Codes,
    route: dict[str, Any],
    gate: dict[str, Any],
    norm: tuple[torch.Tensor | None, float, float, bool],
    residual_TD: torch.Tensor | None,
    given_TX: torch.Tensor | None,
) -> torch.Tensor:
    """Return the weighted sum of each token's experts, [T, D]; see experts_op.reference.

    route: the constexprs NUM_EXPERTS, BLOCK_E, TOP_K and RENORMALISE of kernels. gate: the constexprs ACTIVATION,
    ALPHA, LIMIT and INTERLEAVED. norm: weight [D] or None, eps, offset and wide. given_TX: the chosen experts, whose
    weights logits_TE then holds, or None.
    """
    (num_tokens, hidden_size), width, top_k = x_TD.shape, down.num_columns, route["TOP_K"]
    device, options = x_TD.device, dependent_launch(x_TD.device)
    inputs_TK = torch.empty((num_tokens, hidden_size), dtype=torch.float32, device=device)
    hidden_SI = torch.empty((num_tokens * top_k, width), dtype=torch.float32, device=device)
    chosen_S = torch.empty(num_tokens * top_k, dtype=torch.int32, device=device)
    weights_S = torch.empty(num_tokens * top_k, dtype=torch.float32, device=device)
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    prepare(x_TD, logits_TE, given_TX, norm, (inputs_TK, chosen_S, weights_S, None, None), route, gate_up.unit)
    tiles = word_tiles(hidden_size)
    gate_up_words_kernel[(cdiv(width, tiles.rows), num_tokens * top_k)](
        inputs_TK,
        gate_up.codes_ENB,
        gate_up.scales_ENC,
        gate_up.row_scales_ER1,
        gate_up.bias_EN,
        hidden_SI,
        chosen_S,
        out_TD,
        K=hidden_size,
        WIDTH=width,
        TOP_K=top_k,
        ROWS=tiles.rows,
        BLOCK_W=tiles.block_w,
        TILE_COLUMNS=gate_up.tile_columns,
        SCALES=gate_up.scales,
        UNIT=down.unit,
        num_warps=tiles.num_warps,
        **gate,
        **options,
    )
    block_x = next_power_of_2(top_k)
    tiles = word_tiles(width, block_x)
    down_words_kernel[(cdiv(hidden_size, tiles.rows), num_tokens)](
        hidden_SI,
        down.codes_ENB,
        down.scales_ENC,
        down.row_scales_ER1,
        down.bias_EN,
        chosen_S,
        weights_S,
        residual_TD,
        out_TD,
        HIDDEN_SIZE=hidden_size,
        WIDTH=width,
        TOP_K=top_k,
        BLOCK_X=block_x,
        ROWS=tiles.rows,
        BLOCK_W=tiles.block_w,
        TILE_COLUMNS=down.tile_columns,
        SCALES=down.scales,
        num_warps=tiles.num_warps,
        **options,
    )
    return out_TD
