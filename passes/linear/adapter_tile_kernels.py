"""Adapter kernels for many tokens: each program handles the tokens of one slot within a window of consecutive tokens.

A program gathers its slot's tokens and multiplies them on tensor cores, so that A and B are read once for several
tokens, and other slots' tokens are not read. A window has a program for each slot that may occur, at most MOST_TURNS.
If fewer slots occur, as in a prompt, several programs divide the tokens of a slot. Programs prefetch their part of A or
B into the L2 cache before they wait for the previous kernel.

If there are many windows, each has only one program, which loops over the window's slots. Usually there is only one
slot, since prompts are long.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.linear.adapter_operands import VECTOR, Operands, member_of, tiles_of_members

# Largest token count -> tokens per window, columns of x per program, results per program and warps of expand.
WINDOWS = {32: (32, 512, 128, 4), 64: (64, 512, 256, 8), 512: (128, 1024, 128, 4)}
# Upper bounds of programs per window and of elements per tile of B.
MOST_TURNS, MOST_ELEMENTS = 16, 16384
NO_SLOT = tl.constexpr(1 << 30)  # larger than any slot


@triton.jit
def _ask_for_lines(address: tl.tensor, wanted: tl.tensor) -> None:
    """Prefetch cache lines into the L2 cache, without waiting: those at the addresses for which `wanted` is true."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [address.to(tl.int64), wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@quick_launches
@triton.jit(do_not_specialize=["num_tokens"])
def shrink_kernel(
    x_ptr: tl.tensor,
    a_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    z_ptr: tl.tensor,
    num_tokens: tl.tensor,
    K: tl.constexpr,
    RANK: tl.constexpr,
    MEMBERS: tl.constexpr,
    TURNS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
    COLUMNS_AHEAD: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Write partial sums of z = A x (shrink) over splits of K, for all members: the linears merged into one.

    Program (window of tokens, one of TURNS programs per tile of A's rows, split of K). For each slot assigned to it, a
    program takes the window's tokens with this slot, and multiplies them by BLOCK_R rows of A over SPLIT_COLUMNS
    columns. Rows beyond an adapter's rank, and tokens without an adapter, are not written.

    x_ptr: [num_tokens, K]; a_ptr: [slots, MEMBERS * RANK, K], with RANK rows for each member; ranks_ptr: int32 [slots,
        MEMBERS], the ranks in use; slots_ptr: int32 [num_tokens], the slot of each token, -1 without an adapter.
    z_ptr: float32 [splits, num_tokens, MEMBERS * RANK].
    TURNS: programs that share the slots of a window. WINDOW: tokens of a window; BLOCK_T: tokens multiplied at a time.
    COLUMNS_AHEAD: columns of A prefetched before the wait.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    ROWS: tl.constexpr = RANK * MEMBERS
    TILES: tl.constexpr = (ROWS + BLOCK_R - 1) // BLOCK_R
    token_W = tl.program_id(0) * WINDOW + tl.arange(0, WINDOW)
    row_R = tl.program_id(1) % TILES * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.program_id(2)
    slot_W = tl.load(slots_ptr + token_W, mask=token_W < num_tokens, other=-1)
    end = tl.max(slot_W, 0) + 1
    lowest = tl.min(tl.where(slot_W < 0, NO_SLOT, slot_W), 0)
    begin, part, parts = _share_of(tl.program_id(1) // TILES, lowest, end, TURNS)
    if DEPENDENT_LAUNCH:
        if COLUMNS_AHEAD > 0:
            used_R = _used(ranks_ptr, tl.maximum(tl.minimum(begin, end - 1), 0), row_R, RANK, MEMBERS)
            used_R = used_R & (tl.sum((slot_W == begin).to(tl.int32), 0) > part * BLOCK_T)
            LINE: tl.constexpr = 1024 // a_ptr.dtype.element_ty.primitive_bitwidth
            line_L = split * SPLIT_COLUMNS + tl.arange(0, COLUMNS_AHEAD // LINE) * LINE
            a_ptr_RL = a_ptr + (begin * ROWS + row_R)[:, None].to(tl.int64) * K + line_L[None, :]
            _ask_for_lines(a_ptr_RL, used_R[:, None] & (line_L < K)[None, :])
        gdc_wait()
    for slot in range(begin, end, TURNS):
        own_W = slot_W == slot
        num_own = tl.sum(own_W.to(tl.int32), 0)
        used_R = _used(ranks_ptr, slot, row_R, RANK, MEMBERS)
        if (num_own > 0) & (tl.max(used_R.to(tl.int32), 0) > 0):
            for first in range(part * BLOCK_T, num_own, parts * BLOCK_T):
                token_T, own_T = _chosen(token_W, own_W, first, WINDOW, BLOCK_T)
                z_RT = tl.zeros([BLOCK_R, BLOCK_T], tl.float32)
                for k in tl.range(0, SPLIT_COLUMNS, BLOCK_K, num_stages=NUM_STAGES):
                    column_K = split * SPLIT_COLUMNS + k + tl.arange(0, BLOCK_K)
                    inside_K = column_K < K
                    x_TK = tl.load(
                        x_ptr + token_T[:, None].to(tl.int64) * K + column_K[None, :],
                        mask=own_T[:, None] & inside_K[None, :],
                        other=0.0,
                    )
                    a_RK = tl.load(
                        a_ptr + (slot * ROWS + row_R)[:, None].to(tl.int64) * K + column_K[None, :],
                        mask=used_R[:, None] & inside_K[None, :],
                        other=0.0,
                    )
                    z_RT = tl.dot(a_RK, tl.trans(x_TK), z_RT, input_precision="ieee")
                place_T = (split * num_tokens + token_T).to(tl.int64) * ROWS
                z_ptr_RT = z_ptr + place_T[None, :] + row_R[:, None]
                tl.store(z_ptr_RT, z_RT, mask=used_R[:, None] & own_T[None, :])


@triton.jit
def _share_of(
    turn: tl.tensor, lowest: tl.tensor, end: tl.tensor, TURNS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Assign a slot of lowest, ..., end - 1, and a part of its tokens, to program number `turn` of TURNS.

    Returns (the slot, the index of the part, the number of parts of the slot's tokens). If there are fewer slots than
    programs, there are several parts. If there are more, the program has further slots, TURNS apart.
    """
    num_slots = tl.maximum(end - lowest, 1)
    place = turn % num_slots
    return lowest + place, turn // num_slots, (TURNS - place + num_slots - 1) // num_slots


@triton.jit
def _chosen(
    token_W: tl.tensor, own_W: tl.tensor, first: tl.tensor, WINDOW: tl.constexpr, BLOCK_T: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return (token indices, whether each exists) of BLOCK_T tokens of a window that have the program's slot.

    first: how many tokens with this slot are skipped. token_W: indices of the window's tokens. own_W: whether each of
    them has the slot. If BLOCK_T is WINDOW, token_W and own_W are returned unchanged.
    """
    if BLOCK_T == WINDOW:
        return token_W, own_W
    else:
        place_W = tl.cumsum(own_W.to(tl.int32), 0) - 1 - first
        is_TW = own_W[None, :] & (place_W[None, :] == tl.arange(0, BLOCK_T)[:, None])
        token_T = tl.max(tl.where(is_TW, token_W[None, :], -1), 1)
        return token_T, token_T >= 0


@triton.jit
def _used(
    ranks_ptr: tl.tensor,
    slot: tl.tensor,
    row_R: tl.tensor,
    RANK: tl.constexpr,
    MEMBERS: tl.constexpr,
) -> tl.tensor:
    """Return, for each of the rows row_R of A, whether the slot's adapter uses it.

    A has RANK rows for each of MEMBERS merged linears. The adapter uses the first of these rows, as many as its rank in
    that linear.
    """
    rank_R = tl.load(ranks_ptr + slot * MEMBERS + row_R // RANK, mask=row_R < RANK * MEMBERS, other=0)
    return row_R % RANK < rank_R


@quick_launches
@triton.jit(do_not_specialize=["num_tokens"])
def expand_kernel(
    y_ptr: tl.tensor,
    z_ptr: tl.tensor,
    b_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    N: tl.constexpr,
    RANK: tl.constexpr,
    BEGINS: tl.constexpr,
    ENDS: tl.constexpr,
    FIRST_TILES: tl.constexpr,
    TURNS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    AHEAD: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Write out = y + B z (expand), where z is the sum of shrink's partial sums.

    Grid: (windows of tokens, groups of NUM_BLOCKS tiles of outputs, TURNS). A group's outputs belong to one member of a
    merged linear. Each of the TURNS programs of a window takes some of its slots, or a part of one slot's tokens, and
    computes the group's outputs for these tokens. For tokens without an adapter (slot -1), y is copied.

    y_ptr, out_ptr: [num_tokens, N]; z_ptr: see shrink_kernel; b_ptr: [slots, N, RANK]; ranks_ptr, slots_ptr: as for
        shrink_kernel.
    BEGINS, ENDS, FIRST_TILES: see tiles_of_members. BLOCK_N: outputs of a tile.
    TURNS: programs that share the slots of a window. WINDOW: tokens of a window; BLOCK_T: tokens multiplied at a time.
    BLOCK_R: RANK rounded up to a power of two, at least 16. AHEAD: prefetch B before waiting for the previous kernel.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    MEMBERS: tl.constexpr = len(ENDS)
    member, begin_N, end_N = member_of(tl.program_id(1), BEGINS, ENDS, FIRST_TILES, NUM_BLOCKS * BLOCK_N)
    token_W = tl.program_id(0) * WINDOW + tl.arange(0, WINDOW)
    slot_W = tl.load(slots_ptr + token_W, mask=token_W < num_tokens, other=-2)
    end = tl.max(slot_W, 0) + 1
    lowest = tl.min(tl.where(slot_W < -1, NO_SLOT, slot_W), 0)
    begin, part, parts = _share_of(tl.program_id(2), lowest, end, TURNS)
    r_R = tl.arange(0, BLOCK_R)
    if DEPENDENT_LAUNCH:
        if AHEAD:
            wanted = (begin >= 0) & (tl.sum((slot_W == begin).to(tl.int32), 0) > part * BLOCK_T)
            rank = tl.load(ranks_ptr + begin * MEMBERS + member, mask=wanted, other=0)
            result_N = begin_N + tl.arange(0, BLOCK_N)
            SECTOR: tl.constexpr = 256 // b_ptr.dtype.element_ty.primitive_bitwidth
            r_L = tl.arange(0, (BLOCK_R + SECTOR - 1) // SECTOR) * SECTOR
            b_ptr_NL = b_ptr + (begin * N + result_N[:, None]).to(tl.int64) * RANK + r_L[None, :]
            _ask_for_lines(b_ptr_NL, (result_N < end_N)[:, None] & (r_L < rank)[None, :])
        gdc_wait()
    for slot in range(begin, end, TURNS):
        own_W = slot_W == slot
        num_own = tl.sum(own_W.to(tl.int32), 0)
        rank = tl.load(ranks_ptr + slot * MEMBERS + member, mask=slot >= 0, other=0)
        used_R = r_R < rank
        # Masked in steps of a vector: a mask that may end anywhere prevents vector loads.
        asked_R = (r_R // VECTOR * VECTOR < rank) & (r_R < RANK)
        for first in tl.range(part * BLOCK_T, num_own, parts * BLOCK_T, num_stages=1):
            token_T, own_T = _chosen(token_W, own_W, first, WINDOW, BLOCK_T)
            z_TR = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
            for split in tl.static_range(NUM_SPLITS):
                place_T = (split * num_tokens + token_T).to(tl.int64) * (RANK * MEMBERS) + member * RANK
                z_TR += tl.load(
                    z_ptr + place_T[:, None] + r_R[None, :], mask=own_T[:, None] & asked_R[None, :], other=0.0
                )
            z_TR = tl.where(used_R[None, :], z_TR, 0.0).to(b_ptr.dtype.element_ty)
            for block in tl.range(0, NUM_BLOCKS, num_stages=1):
                result_N = begin_N + block * BLOCK_N + tl.arange(0, BLOCK_N)
                inside_N = result_N < end_N
                place_TN = token_T[:, None].to(tl.int64) * N + result_N[None, :]
                mask_TN = own_T[:, None] & inside_N[None, :]
                y_TN = tl.load(y_ptr + place_TN, mask=mask_TN, other=0.0)
                b_RN = tl.load(
                    b_ptr + (slot * N + result_N[None, :]).to(tl.int64) * RANK + r_R[:, None],
                    mask=asked_R[:, None] & inside_N[None, :],
                    other=0.0,
                )
                b_RN = tl.where(used_R[:, None], b_RN, 0.0)
                sum_TN = tl.dot(z_TR, b_RN, y_TN.to(tl.float32), input_precision="ieee")
                tl.store(out_ptr + place_TN, sum_TN.to(y_TN.dtype), mask=mask_TN)


class Tiles(NamedTuple):
    """Tile sizes of the adapter kernels for many tokens."""

    window: int  # tokens among which a program looks for those of its slot
    turns: int  # programs per window, which share its slots
    # tokens, rows and results: the tokens, rows of A and results of a tile.
    tokens: int
    rows: int
    columns: int  # of x per program
    step: int  # columns multiplied at a time
    stages: int
    results: int
    blocks: int = 1  # tiles of results that a program adds in turn
    expand_warps: int = 4


def choose_tiles(num_tokens: int, k: int, rows: int, rank: int, num_slots: int, dtype: torch.dtype) -> Tiles:
    """Return the tile sizes for a batch of `num_tokens` tokens.

    k: inputs of the linear. rows: rows of a slot's A, of all members together. rank: largest rank of a slot.
    """
    most = next((most for most in WINDOWS if num_tokens <= most), None)
    rows, results = min(64, _block(rows)), max(16, MOST_ELEMENTS // _block(rank))
    if dtype == torch.float32:  # no tensor cores, and twice the bytes
        columns = cdiv(cdiv(k, 4), 32) * 32
        return Tiles(32, _turns(32, num_slots), 16, min(32, rows), columns, 32, 2, 32)
    if most is None:
        return Tiles(32, 1, 32, rows, cdiv(cdiv(k, 2), 64) * 64, 64, 4, min(128, results), blocks=4)
    window, most_columns, most_results, warps = WINDOWS[most]
    columns = min(most_columns, cdiv(k, 128) * 128)
    turns = _turns(window, num_slots)
    return Tiles(window, turns, 16, rows, columns, 128, 3, min(most_results, results), expand_warps=warps)


def _turns(window: int, num_slots: int) -> int:
    """Return the number of programs per window: one per slot, or one per 16 tokens if that is more.

    The number is at most MOST_TURNS.
    """
    return min(max(num_slots, window // 16), MOST_TURNS)


def _block(number: int) -> int:
    return max(16, next_power_of_2(number))


def add_by_tile(operands: Operands, tiles: Tiles) -> torch.Tensor:
    """Return a linear's result plus the tokens' LoRA adapters applied to its input, [T, N]; see adapter_add.

    The kernels for many tokens compute it.
    """
    y_TN, x_TK, a_SRK, b_SNR, ranks_SM, slots_T, sizes = operands
    (num_tokens, num_results), (_, rows, k), rank = y_TN.shape, a_SRK.shape, b_SNR.shape[2]
    num_splits, dependent = cdiv(k, tiles.columns), dependent_launch(x_TK.device)
    windows = cdiv(num_tokens, tiles.window)
    z = torch.empty((num_splits, num_tokens, rows), dtype=torch.float32, device=x_TK.device)
    shrink_kernel[(windows, tiles.turns * cdiv(rows, tiles.rows), num_splits)](
        *(x_TK, a_SRK, ranks_SM, slots_T, z, num_tokens),
        K=k,
        RANK=rank,
        MEMBERS=len(sizes),
        TURNS=tiles.turns,
        SPLIT_COLUMNS=tiles.columns,
        COLUMNS_AHEAD=0 if tiles.turns == 1 else next_power_of_2(tiles.columns + 1) // 2,
        WINDOW=tiles.window,
        BLOCK_T=tiles.tokens,
        BLOCK_R=tiles.rows,
        BLOCK_K=tiles.step,
        NUM_STAGES=tiles.stages,
        **dependent,
    )
    members, result_tiles = tiles_of_members(sizes, tiles.results * tiles.blocks)
    turns = 1 if tiles.turns == 1 else tiles.turns + 1  # one more for tokens without an adapter
    out_TN = torch.empty_like(y_TN)
    expand_kernel[(windows, result_tiles, turns)](
        *(y_TN, z, b_SNR, ranks_SM, slots_T, out_TN, num_tokens),
        N=num_results,
        RANK=rank,
        TURNS=turns,
        NUM_SPLITS=num_splits,
        NUM_BLOCKS=tiles.blocks,
        AHEAD=turns > 1,
        WINDOW=tiles.window,
        BLOCK_T=tiles.tokens,
        BLOCK_N=tiles.results,
        BLOCK_R=_block(rank),
        num_warps=tiles.expand_warps,
        **members,
        **dependent,
    )
    return out_TN
