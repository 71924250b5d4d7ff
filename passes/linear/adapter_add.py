"""The op that adds the requests' adapters to the result of a linear, and its two kernels.

y[t] + B[s] A[s] x[t], where s is the slot of token t's adapter: a token has one adapter or none. Slots hold A and B at
the largest rank; `ranks_SM` says how much of that each adapter uses, so a batch may mix ranks. What is beyond counts as
zero. A scale is multiplied into B when an adapter is placed.

The first kernel (shrink) computes z = A x for all members of a merged linear at once, the second one (expand) adds B z.
Nothing is sorted or counted on the host, and the grids depend on shapes alone, so CUDA graphs hold them. There are two
pairs:

- For few tokens a program has one token, so that all it reads follows from the token's slot and is asked for at once:
  time is latency there.
- For more a program has a window of tokens and one of its slots. It gathers the slot's tokens and multiplies them on
  tensor cores, so A and B are read once a window, and programs whose slot no token has end at once. Where windows are
  many, one program goes through the slots of its window, which is usually one: prompts are long.

What depends on slots alone is asked for before a kernel waits for the one before it. Slots are parameters, and the
tokens' slots are written by a kernel that starts no other early; every program waits before it ends.

The grouping by slots follows Punica's and S-LoRA's kernels (Chen et al., arXiv:2310.18547; Sheng et al.,
arXiv:2311.03285).
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.framework.op_library import define_op

# Up to this many tokens, a program has one.
FEW_TOKENS = 16
# The tiles of such a program: columns of x and ranks (shrink), and most results and elements of B (expand).
TOKEN_COLUMNS, TOKEN_RANKS, TOKEN_RESULTS, TOKEN_ELEMENTS = 512, 16, 256, 8192
# Up to this many tokens, programs divide a tile's slots among them, but so many at most.
MANY_TOKENS, MOST_TURNS = 512, 16
# Elements of a load; larger than any slot.
VECTOR, NO_SLOT = tl.constexpr(8), tl.constexpr(1 << 30)


@triton.jit
def _ask_for_lines(address: tl.tensor, wanted: tl.tensor) -> None:
    """Prefetch the lines at these addresses into the L2 cache where they are wanted, and do not wait."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [address.to(tl.int64), wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _member_of(
    tile: tl.tensor, BEGINS: tl.constexpr, ENDS: tl.constexpr, FIRST_TILES: tl.constexpr, WIDTH: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The member that a tile of WIDTH results belongs to, the tile's first result, and the end of the member's."""
    member, begin, end = tile * 0, tile * WIDTH, tile * 0 + ENDS[0]
    for each in tl.static_range(1, len(ENDS)):
        of_later = tile >= FIRST_TILES[each]
        member = tl.where(of_later, each, member)
        begin = tl.where(of_later, BEGINS[each] + (tile - FIRST_TILES[each]) * WIDTH, begin)
        end = tl.where(of_later, ENDS[each], end)
    return member, begin, end


@quick_launches
@triton.jit(do_not_specialize=["num_tokens"])
def shrink_token_kernel(
    x_ptr: tl.tensor,
    a_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    z_ptr: tl.tensor,
    num_tokens: tl.tensor,
    K: tl.constexpr,
    RANK: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Program (token, split of K, tile of a member's ranks): z[split, token, member * RANK + r] of the ranks in use."""
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    TILES: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    token = tl.program_id(0)
    split = tl.program_id(1)
    member = tl.program_id(2) // TILES
    r_R = tl.program_id(2) % TILES * BLOCK_R + tl.arange(0, BLOCK_R)
    slot = tl.load(slots_ptr + token)
    rank = tl.load(ranks_ptr + slot * MEMBERS + member, mask=slot >= 0, other=0)
    used_R = r_R < rank
    column_K = split * BLOCK_K + tl.arange(0, BLOCK_K)
    inside_K = column_K < K
    row_R = (slot * MEMBERS + member) * RANK + r_R
    a_RK = tl.load(
        a_ptr + row_R[:, None].to(tl.int64) * K + column_K[None, :],
        mask=used_R[:, None] & inside_K[None, :],
        other=0.0,
    )
    if DEPENDENT_LAUNCH:
        gdc_wait()
    if tl.program_id(2) % TILES * BLOCK_R < rank:
        x_K = tl.load(x_ptr + token.to(tl.int64) * K + column_K, mask=inside_K, other=0.0).to(tl.float32)
        place = (split * num_tokens + token).to(tl.int64) * (RANK * MEMBERS) + member * RANK
        tl.store(z_ptr + place + r_R, tl.sum(a_RK.to(tl.float32) * x_K[None, :], 1), mask=used_R)


@quick_launches
@triton.jit(do_not_specialize=["num_tokens"])
def expand_token_kernel(
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
    NUM_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Program (token, tile of a member's results): y + B z. BLOCK_S, BLOCK_R: powers of two that NUM_SPLITS and RANK
    do not exceed."""
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    MEMBERS: tl.constexpr = len(ENDS)
    token = tl.program_id(0)
    member, begin, end = _member_of(tl.program_id(1), BEGINS, ENDS, FIRST_TILES, BLOCK_N)
    result_N = begin + tl.arange(0, BLOCK_N)
    inside_N = result_N < end
    slot = tl.load(slots_ptr + token)
    rank = tl.load(ranks_ptr + slot * MEMBERS + member, mask=slot >= 0, other=0)
    r_R = tl.arange(0, BLOCK_R)
    # In steps of a vector: a mask that ends anywhere takes loads apart.
    asked_R = (r_R // VECTOR * VECTOR < rank) & (r_R < RANK)
    b_NR = tl.load(
        b_ptr + (slot * N + result_N[:, None]).to(tl.int64) * RANK + r_R[None, :],
        mask=inside_N[:, None] & asked_R[None, :],
        other=0.0,
    )
    if DEPENDENT_LAUNCH:
        gdc_wait()
    place_N = token.to(tl.int64) * N + result_N
    y_N = tl.load(y_ptr + place_N, mask=inside_N, other=0.0)
    split_S = tl.arange(0, BLOCK_S)
    place_S = (split_S * num_tokens + token).to(tl.int64) * (RANK * MEMBERS) + member * RANK
    z_SR = tl.load(
        z_ptr + place_S[:, None] + r_R[None, :], mask=(split_S < NUM_SPLITS)[:, None] & asked_R[None, :], other=0.0
    )
    used_R = r_R < rank
    z_R = tl.where(used_R, tl.sum(z_SR, 0), 0.0).to(b_NR.dtype).to(tl.float32)
    b_NR = tl.where(used_R[None, :], b_NR, 0.0).to(tl.float32)
    tl.store(out_ptr + place_N, (y_N.to(tl.float32) + tl.sum(b_NR * z_R[None, :], 1)).to(y_N.dtype), mask=inside_N)


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
    """Program (WINDOW tokens, one slot of TURNS and tile of its rows of A, split of K):
    z[split, token, member * RANK + r] of the slot's tokens."""
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    ROWS: tl.constexpr = RANK * MEMBERS
    TILES: tl.constexpr = (ROWS + BLOCK_R - 1) // BLOCK_R
    token_W = tl.program_id(0) * WINDOW + tl.arange(0, WINDOW)
    row_R = tl.program_id(1) % TILES * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.program_id(2)
    slot_W = tl.load(slots_ptr + token_W, mask=token_W < num_tokens, other=-1)
    begin = tl.min(tl.where(slot_W < 0, NO_SLOT, slot_W), 0) + tl.program_id(1) // TILES
    end = tl.max(slot_W, 0) + 1
    if DEPENDENT_LAUNCH:
        if COLUMNS_AHEAD > 0:
            used_R = _used(ranks_ptr, tl.maximum(tl.minimum(begin, end - 1), 0), row_R, RANK, MEMBERS)
            used_R = used_R & (tl.max((slot_W == begin).to(tl.int32), 0) > 0)
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
            for first in range(0, num_own, BLOCK_T):
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
def _chosen(
    token_W: tl.tensor, own_W: tl.tensor, first: tl.tensor, WINDOW: tl.constexpr, BLOCK_T: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """BLOCK_T tokens of the slot from its `first` one on, and which of them there are; all places of a small window."""
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
    """Whether the slot's adapter uses these rows of A."""
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
    """Program (WINDOW tokens, NUM_BLOCKS tiles of a member's results, one slot of TURNS): y + B z of the slot's tokens.

    Tokens without an adapter are those of slot -1. BEGINS, ENDS: of each member's results. FIRST_TILES: the first
    program of each member. BLOCK_R: RANK or a power of two beyond.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    MEMBERS: tl.constexpr = len(ENDS)
    member, begin_N, end_N = _member_of(tl.program_id(1), BEGINS, ENDS, FIRST_TILES, NUM_BLOCKS * BLOCK_N)
    token_W = tl.program_id(0) * WINDOW + tl.arange(0, WINDOW)
    slot_W = tl.load(slots_ptr + token_W, mask=token_W < num_tokens, other=-2)
    begin = tl.min(tl.where(slot_W < -1, NO_SLOT, slot_W), 0) + tl.program_id(2)
    end = tl.max(slot_W, 0) + 1
    r_R = tl.arange(0, BLOCK_R)
    if DEPENDENT_LAUNCH:
        if AHEAD:
            wanted = (begin >= 0) & (tl.max((slot_W == begin).to(tl.int32), 0) > 0)
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
        # In steps of a vector: a mask that ends anywhere takes loads apart.
        asked_R = (r_R // VECTOR * VECTOR < rank) & (r_R < RANK)
        for first in tl.range(0, num_own, BLOCK_T, num_stages=1):
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


def reference(
    y_TN: torch.Tensor,
    x_TK: torch.Tensor,
    a_SRK: torch.Tensor,
    b_SNR: torch.Tensor,
    ranks_SM: torch.Tensor,
    slots_T: torch.Tensor,
    sizes: list[int],
) -> torch.Tensor:
    """y + B[slot] A[slot] x for each token; y where the slot is negative.

    x_TK, y_TN: input and result of a linear, which consists of M members with these sizes. a_SRK: for each slot and
    member `rank` rows, of which the first ranks_SM count, int32. b_SNR: [slots, N, rank]. slots_T: int32.
    """
    num_slots, num_members, rank = len(a_SRK), len(sizes), b_SNR.shape[2]
    z_TSMR = (x_TK @ a_SRK.flatten(0, 1).t()).unflatten(1, (num_slots, num_members, rank))
    each_S = torch.arange(num_slots, device=slots_T.device)
    each_R = torch.arange(rank, device=slots_T.device)
    chosen_TS = slots_T.unsqueeze(1) == each_S
    used_SMR = each_R < ranks_SM.unsqueeze(2)
    z_TSMR = torch.where(chosen_TS[:, :, None, None] & used_SMR, z_TSMR, 0.0)
    parts = []
    for member, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        b_NSR = b_SNR[:, end - size : end].transpose(0, 1)
        parts.append(z_TSMR[:, :, member].flatten(1) @ b_NSR.flatten(1).t())
    return y_TN + (parts[0] if num_members == 1 else torch.cat(parts, 1))


class Tiles(NamedTuple):
    """How tokens are divided when a program has several.

    window: tokens among which a program looks for those of its slot. tokens, rows, results: of a tile. columns: of x
    that a program multiplies, `step` of them at a time. slots: programs that divide a window's slots among them.
    blocks: tiles of results that a program adds in turn.
    """

    window: int
    tokens: int
    rows: int
    columns: int
    step: int
    slots: int
    results: int
    blocks: int
    stages: int = 3
    shrink_warps: int = 4
    expand_warps: int = 4


class Operands(NamedTuple):
    """The arguments of the op."""

    y_TN: torch.Tensor
    x_TK: torch.Tensor
    a_SRK: torch.Tensor
    b_SNR: torch.Tensor
    ranks_SM: torch.Tensor
    slots_T: torch.Tensor
    sizes: list[int]


def choose_tiles(num_tokens: int, k: int, rows: int, rank: int, num_slots: int, dtype: torch.dtype) -> Tiles:
    """rows: of a slot's A."""
    if dtype == torch.float32:  # no tensor cores, and twice the bytes
        return Tiles(32, 16, min(32, _block(rows)), cdiv(cdiv(k, 4), 32) * 32, 32, min(num_slots, MOST_TURNS), 32, 1, 2)
    rows = min(64, _block(rows))
    if num_tokens > MANY_TOKENS:
        return Tiles(64, 64, rows, cdiv(cdiv(k, 2), 64) * 64, 64, 1, 128, 4, 4, 4, 8)
    columns = 512 if rank <= 32 else 1024
    window = min(64, _block(num_tokens))
    return Tiles(window, 16, rows, min(columns, cdiv(k, 128) * 128), 128, min(num_slots, MOST_TURNS), 128, 1)


def _block(number: int) -> int:
    return max(16, next_power_of_2(number))


def launch(
    y_TN: torch.Tensor,
    x_TK: torch.Tensor,
    a_SRK: torch.Tensor,
    b_SNR: torch.Tensor,
    ranks_SM: torch.Tensor,
    slots_T: torch.Tensor,
    sizes: list[int],
) -> torch.Tensor:
    """The kernels behind `reference`."""
    operands = Operands(y_TN.contiguous(), x_TK.contiguous(), a_SRK, b_SNR, ranks_SM, slots_T, sizes)
    num_slots, rows, k = a_SRK.shape
    if len(y_TN) <= FEW_TOKENS:
        return add_by_token(operands)
    return add_by_tile(operands, choose_tiles(len(y_TN), k, rows, b_SNR.shape[2], num_slots, x_TK.dtype))


def add_by_token(
    operands: Operands, block_k: int = TOKEN_COLUMNS, block_r: int = TOKEN_RANKS, most: int = TOKEN_RESULTS
) -> torch.Tensor:
    y_TN, x_TK, a_SRK, b_SNR, ranks_SM, slots_T, sizes = operands
    (num_tokens, num_results), (_, rows, k), rank = y_TN.shape, a_SRK.shape, b_SNR.shape[2]
    num_splits, dependent = cdiv(k, block_k), dependent_launch(x_TK.device)
    z = torch.empty((num_splits, num_tokens, rows), dtype=torch.float32, device=x_TK.device)
    shrink_token_kernel[(num_tokens, num_splits, len(sizes) * cdiv(rank, block_r))](
        *(x_TK, a_SRK, ranks_SM, slots_T, z, num_tokens),
        K=k,
        RANK=rank,
        MEMBERS=len(sizes),
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        **dependent,
    )
    block_rank = next_power_of_2(rank)
    block_n = max(16, min(most, TOKEN_ELEMENTS // block_rank))
    members, tiles = _members(sizes, block_n)
    out_TN = torch.empty_like(y_TN)
    expand_token_kernel[(num_tokens, tiles)](
        *(y_TN, z, b_SNR, ranks_SM, slots_T, out_TN, num_tokens),
        N=num_results,
        RANK=rank,
        NUM_SPLITS=num_splits,
        BLOCK_S=next_power_of_2(num_splits),
        BLOCK_N=block_n,
        BLOCK_R=block_rank,
        **members,
        **dependent,
    )
    return out_TN


def add_by_tile(operands: Operands, tiles: Tiles) -> torch.Tensor:
    y_TN, x_TK, a_SRK, b_SNR, ranks_SM, slots_T, sizes = operands
    (num_tokens, num_results), (_, rows, k), rank = y_TN.shape, a_SRK.shape, b_SNR.shape[2]
    num_splits, dependent = cdiv(k, tiles.columns), dependent_launch(x_TK.device)
    windows = cdiv(num_tokens, tiles.window)
    z = torch.empty((num_splits, num_tokens, rows), dtype=torch.float32, device=x_TK.device)
    shrink_kernel[(windows, tiles.slots * cdiv(rows, tiles.rows), num_splits)](
        *(x_TK, a_SRK, ranks_SM, slots_T, z, num_tokens),
        K=k,
        RANK=rank,
        MEMBERS=len(sizes),
        TURNS=tiles.slots,
        SPLIT_COLUMNS=tiles.columns,
        COLUMNS_AHEAD=0 if tiles.slots == 1 else next_power_of_2(tiles.columns + 1) // 2,
        WINDOW=tiles.window,
        BLOCK_T=tiles.tokens,
        BLOCK_R=tiles.rows,
        BLOCK_K=tiles.step,
        NUM_STAGES=tiles.stages,
        num_warps=tiles.shrink_warps,
        **dependent,
    )
    members, result_tiles = _members(sizes, tiles.results * tiles.blocks)
    turns = 1 if tiles.slots == 1 else tiles.slots + 1  # tokens without an adapter are one more
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


def _members(sizes: list[int], width: int) -> tuple[dict[str, tuple[int, ...]], int]:
    """Where members and their tiles of `width` results begin and end, and how many tiles there are."""
    ends = tuple(accumulate(sizes))
    last_tiles = tuple(accumulate(cdiv(size, width) for size in sizes))
    return {"BEGINS": (0, *ends[:-1]), "ENDS": ends, "FIRST_TILES": (0, *last_tiles[:-1])}, last_tiles[-1]


def _fake(y_TN: torch.Tensor, *others: object) -> torch.Tensor:
    return torch.empty_like(y_TN, memory_format=torch.contiguous_format)


adapter_add = define_op(
    "adapter_add(Tensor y_TN, Tensor x_TK, Tensor a_SRK, Tensor b_SNR, Tensor ranks_SM, Tensor slots_T, int[] sizes)"
    " -> Tensor",
    cpu=reference,
    cuda=launch,
    fake=_fake,
    reference=reference,
)
