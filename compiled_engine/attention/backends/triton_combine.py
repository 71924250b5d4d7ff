"""Triton kernel: combines the partial results of the splits of a query's keys (Dao et al. 2023, Flash-Decoding)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.attention.backends.decode_splits import GRAIN, Splits
from compiled_engine.attention.backends.triton_tile import (
    LOG2_E,
    LOWEST,
    head_elements,
    head_masks,
    keys_of_rows,
    normalised,
    scales,
    store_parts,
)
from compiled_engine.attention.backends.work_list import split_length
from compiled_engine.attention.inputs import AttentionInputs, Scoring
from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches

# Most elements of a head that a program combines: with as many splits as there may be, registers hold no more.
WIDEST_PART = 256


class Partials(NamedTuple):
    """Buffers for the partial results of S splits of R rows, float32: acc [R, H, S, d], max and sum [R, H, S].

    acc is not yet divided by sum, and max is not yet multiplied by scale_log2. All three are empty for a single split.
    """

    acc: torch.Tensor
    max: torch.Tensor
    sum: torch.Tensor

    @classmethod
    def of(cls, out_THd: torch.Tensor, num_rows: int, num_splits: int) -> Partials:
        _, num_heads, head_dim = out_THd.shape
        shape = (num_rows, num_heads, num_splits) if num_splits > 1 else (0,)
        acc = out_THd.new_empty((*shape, head_dim), dtype=torch.float32)
        # Iterating over the tensor would take the host twice as long.
        return cls(acc, *out_THd.new_empty((2, *shape), dtype=torch.float32).unbind())

    @classmethod
    def of_rows(cls, out_THd: torch.Tensor, num_rows: int) -> Partials:
        """Return buffers for R rows that are one query head each: acc [R, d], max and sum [R]."""
        acc = out_THd.new_empty((num_rows, out_THd.shape[2]), dtype=torch.float32)
        return cls(acc, *out_THd.new_empty((2, num_rows), dtype=torch.float32).unbind())


@triton.jit
def store_partials(
    partial_ptr: tl.tensor,
    partial_max_ptr: tl.tensor,
    partial_sum_ptr: tl.tensor,
    partials_M: tl.tensor,
    mask_M: tl.tensor,
    acc_parts: tl.tuple,
    max_M: tl.tensor,
    sum_M: tl.tensor,
    HEAD_DIM: tl.constexpr,
    TILE_D: tl.constexpr,
) -> None:
    """Store the partial results of M rows for a split in buffers laid out as Partials.

    acc_parts: weighted sums of values, in one tile [M, D], or two for a head with a tail (triton_tile.py). max_M,
    sum_M: largest scores and sums of weights. partials_M: the index of each row's partial result, counted over all
    rows, heads and splits. mask_M: rows to store.
    """
    elements = head_elements(HEAD_DIM, TILE_D)
    masks = head_masks(mask_M, elements, HEAD_DIM)
    store_parts(partial_ptr, partials_M[:, None] * HEAD_DIM, acc_parts, elements, masks)
    tl.store(partial_max_ptr + partials_M, max_M, mask=mask_M)
    tl.store(partial_sum_ptr + partials_M, sum_M, mask=mask_M)


@triton.jit
def combined(
    partial_ptr: tl.tensor,
    partial_max_ptr: tl.tensor,
    partial_sum_ptr: tl.tensor,
    partials_S: tl.tensor,
    written_S: tl.tensor,
    sinks_ptr: tl.tensor,
    head: tl.tensor,
    d_D: tl.tensor,
    scale_log2: tl.tensor,
    HEAD_DIM: tl.constexpr,
    CACHE_MODIFIER: tl.constexpr,
) -> tl.tensor:
    """Return elements d_D of the result of one head, fp32 [D], combined from the partial results of its splits.

    partial_ptr, partial_max_ptr, partial_sum_ptr: see Partials.
    partials_S: the index of each split's partial result; written_S: whether the split stored one.
    sinks_ptr: [H] or None; head: the query head.
    CACHE_MODIFIER: cache modifier of the loads; ".cg" if the partial results were stored in this launch.
    """
    max_S = tl.load(partial_max_ptr + partials_S, mask=written_S, other=LOWEST, cache_modifier=CACHE_MODIFIER)
    sum_S = tl.load(partial_sum_ptr + partials_S, mask=written_S, other=0.0, cache_modifier=CACHE_MODIFIER)
    acc_ptrs_SD = partial_ptr + partials_S[:, None] * HEAD_DIM + d_D[None, :]
    mask_SD = written_S[:, None] & (d_D[None, :] < HEAD_DIM)
    acc_SD = tl.load(acc_ptrs_SD, mask=mask_SD, other=0.0, cache_modifier=CACHE_MODIFIER)
    largest = tl.max(max_S, 0)
    weight_S = tl.exp2((max_S - largest) * scale_log2)
    total = tl.sum(sum_S * weight_S, 0)
    if sinks_ptr is not None:
        total += tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E - largest * scale_log2)
    return tl.sum(acc_SD * weight_S[:, None], 0) / tl.where(total > 0, total, 1.0)


@triton.jit
def store_combined(
    out_ptrs_M: tl.tensor,
    partial_ptr: tl.tensor,
    partial_max_ptr: tl.tensor,
    partial_sum_ptr: tl.tensor,
    partials_M: tl.tensor,
    mask_M: tl.tensor,
    num_splits: tl.tensor,
    sinks_ptr: tl.tensor,
    heads_M: tl.tensor,
    scale_log2: tl.tensor,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_D: tl.constexpr,
) -> None:
    """Store the results of the rows of a tile, combined from what `store_partials` stored in this launch.

    out_ptrs_M: pointers to the result of each row's head. mask_M: rows to store.
    partials_M: the index of each row's partial result of the first split; the index of the next split is TILE_M higher.
    sinks_ptr, heads_M: see normalised. TILE_D: elements that are combined together.
    """
    max_M = tl.full([TILE_M], LOWEST, tl.float32)
    for split in range(num_splits):
        ptrs_M = partial_max_ptr + partials_M + split * TILE_M
        max_M = tl.maximum(max_M, tl.load(ptrs_M, mask=mask_M, other=LOWEST, cache_modifier=".cg"))
    for start in range(0, HEAD_DIM, TILE_D):
        d_D = start + tl.arange(0, TILE_D)
        mask_MD = mask_M[:, None] & (d_D[None, :] < HEAD_DIM)
        acc_MD = tl.zeros([TILE_M, TILE_D], tl.float32)
        sum_M = tl.zeros([TILE_M], tl.float32)
        for split in range(num_splits):
            split_M = partials_M + split * TILE_M
            split_max_M = tl.load(partial_max_ptr + split_M, mask=mask_M, other=LOWEST, cache_modifier=".cg")
            weight_M = tl.exp2((split_max_M - max_M) * scale_log2)
            sum_M += weight_M * tl.load(partial_sum_ptr + split_M, mask=mask_M, other=0.0, cache_modifier=".cg")
            ptrs_MD = partial_ptr + split_M[:, None] * HEAD_DIM + d_D[None, :]
            acc_MD += weight_M[:, None] * tl.load(ptrs_MD, mask=mask_MD, other=0.0, cache_modifier=".cg")
        out_MD = normalised(acc_MD, max_M, sum_M, sinks_ptr, heads_M, mask_M, scale_log2)
        tl.store(out_ptrs_M[:, None] + d_D[None, :], out_MD.to(out_ptrs_M.dtype.element_ty), mask=mask_MD)


@quick_launches
@triton.jit(
    do_not_specialize=["out_token_stride", "num_splits", "min_keys"],
    do_not_specialize_on_alignment=["partial_max_ptr", "partial_sum_ptr", "seq_lens_ptr", "sinks_ptr"],
)
def combine_kernel(
    partial_ptr: tl.tensor,
    partial_max_ptr: tl.tensor,
    partial_sum_ptr: tl.tensor,
    out_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    scale_log2: tl.tensor,
    out_token_stride: tl.tensor,
    num_splits: tl.tensor,
    min_keys: tl.tensor,
    OUT_HEAD_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_D: tl.constexpr,
    GRAIN: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Combine partial results. Program (head, row, part) writes a part of the result of one head of one row to out.

    A row with a single split is left alone, since that split's program has written the result.

    partial_ptr, partial_max_ptr, partial_sum_ptr: see Partials.
    out_ptr: [rows, H, d]; seq_lens_ptr: int32 [rows]; sinks_ptr: [H] or None.
    min_keys, GRAIN: see work_list.split_length; the same as for the kernel that stored the partial results.
    QUERY_LEN: consecutive rows that share a request and its splits. TILE_Q, TILE_S: QUERY_LEN and the number of splits,
        rounded up to powers of two. TILE_D: elements of a part.
    """
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if QUERY_LEN == 1:
        num_keys = tl.load(seq_lens_ptr + row)
        if WINDOW > 0:
            num_keys = tl.minimum(num_keys, WINDOW)
    else:
        first_key, end_key, _ = keys_of_rows(seq_lens_ptr, row // QUERY_LEN * QUERY_LEN, QUERY_LEN, WINDOW, TILE_Q)
        num_keys = end_key - first_key
    length = split_length(num_keys, num_splits, min_keys, GRAIN)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    if length >= num_keys:
        return  # a lone split has written the result
    splits_S = tl.arange(0, TILE_S)
    written_S = (splits_S * length < num_keys) & (splits_S < num_splits)
    d_D = tl.arange(0, TILE_D)
    if TILE_D < HEAD_DIM:
        d_D += tl.program_id(2) * TILE_D
    partials_S = (row * tl.num_programs(0) + head) * num_splits + splits_S
    partials = partial_ptr, partial_max_ptr, partial_sum_ptr
    out_D = combined(*partials, partials_S, written_S, sinks_ptr, head, d_D, scale_log2, HEAD_DIM, "")
    out_row = tl.multiple_of(row * out_token_stride, 8) + head * OUT_HEAD_STRIDE
    tl.store(out_ptr + out_row + d_D, out_D.to(out_ptr.dtype.element_ty), mask=d_D < HEAD_DIM)


def combine_splits(
    partials: Partials,
    out_THd: torch.Tensor,
    inputs: AttentionInputs,
    splits: Splits,
    scoring: Scoring,
    query_len: int = 1,
) -> None:
    """Combine the partial results of a decode kernel, and write the results of rows whose keys were split to out_THd.

    splits: as for the decode kernel. query_len: consecutive rows that share a request.
    """
    num_rows, num_heads, _, head_dim = partials.acc.shape
    tile_d = min(next_power_of_2(head_dim), WIDEST_PART)
    combine_kernel[(num_heads, num_rows, cdiv(head_dim, tile_d))](
        *partials,
        out_THd,
        inputs.seq_lens_R,
        scoring.sinks_H,
        scales(scoring)[0],
        out_THd.stride(0),
        splits.count,
        splits.min_keys,
        OUT_HEAD_STRIDE=out_THd.stride(1),
        WINDOW=scoring.sliding_window,
        HEAD_DIM=head_dim,
        QUERY_LEN=query_len,
        TILE_Q=next_power_of_2(query_len),
        TILE_S=next_power_of_2(splits.count),
        TILE_D=tile_d,
        GRAIN=GRAIN,
        num_warps=4,
        enable_fp_fusion=True,
        **dependent_launch(out_THd.device),
    )
