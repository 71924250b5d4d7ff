"""The op that adds the requests' adapters to the result of a linear, and its two kernels.

y[t] + B[s] A[s] x[t], where s is the slot of token t's adapter: a token has one adapter or none. Slots hold A and B at
the largest rank; `ranks_SM` says how much of that each adapter uses, so a batch may mix ranks. What is beyond counts as
zero. A scale is multiplied into B when an adapter is placed.

The first kernel (shrink) computes z = A x for all members of a merged linear at once, the second one (expand) adds B z.
Nothing is sorted or counted, on the host or on the device, and the grids depend on shapes alone, so CUDA graphs hold
them. There are two pairs:

- For few tokens a program has one token, so that all it reads follows from the token's slot and is asked for at once:
  time is latency there, and A and B come from the L2 cache when tokens share a slot.
- For more a program has a tile of tokens, and the slots lie beside each other in one product on tensor cores: A of all
  slots has slots * rank rows, and z has as many columns, of which a token keeps those of its slot. Only matrices that a
  token of the tile needs are read, and tiles of slots that none needs are skipped, so the cost of a tile does not grow
  with the number of slots.

The grouping by tiles follows Punica's and S-LoRA's kernels (Chen et al., arXiv:2310.18547; Sheng et al.,
arXiv:2311.03285).
"""

from __future__ import annotations

from itertools import accumulate

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.framework.op_library import define_op

# Up to this many tokens, a program has one.
FEW_TOKENS = 64
# The tiles of such a program: columns of x (shrink), results (expand), and the ranks that are read together (both).
TOKEN_COLUMNS, TOKEN_RESULTS, TOKEN_RANKS = 512, 256, 16
# The tiles of more tokens: tokens, columns of x, results, and most rows of A or ranks of all slots that are multiplied
# together.
BLOCK_TOKENS, BLOCK_COLUMNS, BLOCK_RESULTS, MOST_RANKS = 64, 64, 128, 128
# Shrink splits K until there are so many programs.
MOST_SPLITS, ENOUGH_PROGRAMS = 16, 256


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
    """Program (token, split of K, member): z[split, token, member * RANK + r] of the ranks that its adapter uses."""
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    split = tl.program_id(1)
    member = tl.program_id(2)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    rank = tl.load(ranks_ptr + slot * MEMBERS + member)
    column_K = split * BLOCK_K + tl.arange(0, BLOCK_K)
    inside_K = column_K < K
    x_K = tl.load(x_ptr + token.to(tl.int64) * K + column_K, mask=inside_K, other=0.0).to(tl.float32)
    for first in tl.static_range(0, RANK, BLOCK_R):
        if first < rank:
            r_R = first + tl.arange(0, BLOCK_R)
            used_R = r_R < rank
            row_R = (slot * MEMBERS + member) * RANK + r_R
            a_RK = tl.load(
                a_ptr + row_R[:, None].to(tl.int64) * K + column_K[None, :],
                mask=used_R[:, None] & inside_K[None, :],
                other=0.0,
            )
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
    NUM_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Program (token, tile of results): y + B z. BLOCK_S: NUM_SPLITS or a power of two beyond."""
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    MEMBERS: tl.constexpr = len(ENDS)
    token = tl.program_id(0)
    result = tl.program_id(1) * BLOCK_N
    result_N = result + tl.arange(0, BLOCK_N)
    slot = tl.load(slots_ptr + token)
    place_N = token.to(tl.int64) * N + result_N
    y_N = tl.load(y_ptr + place_N, mask=result_N < N, other=0.0)
    sum_N = y_N.to(tl.float32)
    if slot >= 0:
        for member in tl.static_range(MEMBERS):
            if (result < ENDS[member]) & (result + BLOCK_N > BEGINS[member]):
                of_member_N = (result_N >= BEGINS[member]) & (result_N < ENDS[member])
                rank = tl.load(ranks_ptr + slot * MEMBERS + member)
                for first in tl.static_range(0, RANK, BLOCK_R):
                    if first < rank:
                        r_R = first + tl.arange(0, BLOCK_R)
                        used_R = r_R < rank
                        split_S = tl.arange(0, BLOCK_S)
                        place_S = (split_S * num_tokens + token).to(tl.int64) * (RANK * MEMBERS) + member * RANK
                        # Masks that do not depend on the rank leave loads of several elements whole.
                        z_SR = tl.load(
                            z_ptr + place_S[:, None] + r_R[None, :],
                            mask=(split_S < NUM_SPLITS)[:, None] & (r_R < RANK)[None, :],
                            other=0.0,
                        )
                        z_R = tl.where(used_R, tl.sum(z_SR, 0), 0.0)
                        b_NR = tl.load(
                            b_ptr + (slot * N + result_N[:, None]).to(tl.int64) * RANK + r_R[None, :],
                            mask=of_member_N[:, None] & (r_R < RANK)[None, :],
                            other=0.0,
                        )
                        b_NR = tl.where(used_R[None, :], b_NR, 0.0)
                        sum_N += tl.sum(b_NR.to(tl.float32) * z_R.to(b_NR.dtype).to(tl.float32)[None, :], 1)
    tl.store(out_ptr + place_N, sum_N.to(y_N.dtype), mask=result_N < N)


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
    NUM_SLOTS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Program (tile of tokens, tile of the rows of all slots' A, split of K): z[split, token, member * RANK + r]."""
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    ROWS: tl.constexpr = RANK * MEMBERS
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row_R = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.program_id(2)
    slot_T = tl.load(slots_ptr + token_T, mask=token_T < num_tokens, other=-1)
    own_TR = slot_T[:, None] == (row_R // ROWS)[None, :]
    wanted_R = (tl.max(own_TR.to(tl.int32), 0) > 0) & (row_R < NUM_SLOTS * ROWS)
    if tl.max(wanted_R.to(tl.int32), 0) == 0:
        return
    used_R = wanted_R & (row_R % RANK < tl.load(ranks_ptr + row_R // RANK, mask=wanted_R, other=0))
    z_TR = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for k in range(0, SPLIT_COLUMNS, BLOCK_K):
        column_K = split * SPLIT_COLUMNS + k + tl.arange(0, BLOCK_K)
        inside_K = column_K < K
        x_TK = tl.load(
            x_ptr + token_T[:, None].to(tl.int64) * K + column_K[None, :],
            mask=(slot_T >= 0)[:, None] & inside_K[None, :],
            other=0.0,
        )
        a_KR = tl.load(
            a_ptr + row_R[None, :].to(tl.int64) * K + column_K[:, None],
            mask=used_R[None, :] & inside_K[:, None],
            other=0.0,
        )
        z_TR = tl.dot(x_TK, a_KR, z_TR, input_precision="ieee")
    place_T = (split * num_tokens + token_T).to(tl.int64) * ROWS
    tl.store(z_ptr + place_T[:, None] + (row_R % ROWS)[None, :], z_TR, mask=own_TR & used_R[None, :])


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
    NUM_SLOTS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Program (tile of tokens, tile of a member's results): y + B z.

    BEGINS, ENDS: of each member's results. FIRST_TILES: the first tile of each member. BLOCK_S: slots whose ranks are
    multiplied together. BLOCK_R: RANK or a power of two beyond.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    MEMBERS: tl.constexpr = len(ENDS)
    tile = tl.program_id(1)
    member, begin, end = tile * 0, tile * BLOCK_N, tile * 0 + ENDS[0]
    for each in tl.static_range(1, MEMBERS):
        of_later = tile >= FIRST_TILES[each]
        member = tl.where(of_later, each, member)
        begin = tl.where(of_later, BEGINS[each] + (tile - FIRST_TILES[each]) * BLOCK_N, begin)
        end = tl.where(of_later, ENDS[each], end)
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside_T = token_T < num_tokens
    slot_T = tl.load(slots_ptr + token_T, mask=inside_T, other=-1)
    adapted_T = slot_T >= 0
    result_N = begin + tl.arange(0, BLOCK_N)
    inside_N = result_N < end
    place_TN = token_T[:, None].to(tl.int64) * N + result_N[None, :]
    mask_TN = inside_T[:, None] & inside_N[None, :]
    y_TN = tl.load(y_ptr + place_TN, mask=mask_TN, other=0.0)
    sum_TN = y_TN.to(tl.float32)
    rank_T = tl.load(ranks_ptr + slot_T * MEMBERS + member, mask=adapted_T, other=0)
    r_R = tl.arange(0, BLOCK_R)
    z_TR = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    # Masks that do not depend on the rank leave loads of several elements whole.
    for split in tl.static_range(NUM_SPLITS):
        place_T = (split * num_tokens + token_T).to(tl.int64) * (RANK * MEMBERS) + member * RANK
        z_TR += tl.load(
            z_ptr + place_T[:, None] + r_R[None, :], mask=adapted_T[:, None] & (r_R < RANK)[None, :], other=0.0
        )
    z_TR = tl.where(r_R[None, :] < rank_T[:, None], z_TR, 0.0)
    for first in range(0, NUM_SLOTS, BLOCK_S):
        slot_S = first + tl.arange(0, BLOCK_S)
        own_TS = slot_T[:, None] == slot_S[None, :]
        wanted_S = tl.max(own_TS.to(tl.int32), 0) > 0
        if tl.max(wanted_S.to(tl.int32), 0) > 0:
            # The ranks of these slots are the columns of one product, in which a token has those of its own slot.
            z_TSR = tl.where(own_TS[:, :, None], z_TR[:, None, :], 0.0)
            rank_S = tl.load(ranks_ptr + slot_S * MEMBERS + member, mask=wanted_S, other=0)
            b_SRN = tl.load(
                b_ptr + (slot_S[:, None, None] * N + result_N[None, None, :]).to(tl.int64) * RANK + r_R[None, :, None],
                mask=wanted_S[:, None, None] & (r_R < RANK)[None, :, None] & inside_N[None, None, :],
                other=0.0,
            )
            b_SRN = tl.where(r_R[None, :, None] < rank_S[:, None, None], b_SRN, 0.0)
            z_TC = tl.reshape(z_TSR, [BLOCK_T, BLOCK_S * BLOCK_R]).to(b_SRN.dtype)
            b_CN = tl.reshape(b_SRN, [BLOCK_S * BLOCK_R, BLOCK_N])
            sum_TN = tl.dot(z_TC, b_CN, sum_TN, input_precision="ieee")
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
    y_TN, x_TK = y_TN.contiguous(), x_TK.contiguous()
    num_slots, rows, k = a_SRK.shape
    num_tokens, num_results = y_TN.shape
    rank, ends = b_SNR.shape[2], tuple(accumulate(sizes))
    begins = (0, *ends[:-1])
    of_shrink = {"K": k, "RANK": rank, "MEMBERS": len(sizes), **dependent_launch(x_TK.device)}
    of_expand = {"N": num_results, "RANK": rank, "BEGINS": begins, "ENDS": ends, **dependent_launch(x_TK.device)}
    if num_tokens <= FEW_TOKENS:
        num_splits = cdiv(k, TOKEN_COLUMNS)
        z = torch.empty((num_splits, num_tokens, rows), dtype=torch.float32, device=x_TK.device)
        shrink_token_kernel[(num_tokens, num_splits, len(sizes))](
            x_TK, a_SRK, ranks_SM, slots_T, z, num_tokens, BLOCK_R=TOKEN_RANKS, BLOCK_K=TOKEN_COLUMNS, **of_shrink
        )
        out_TN = torch.empty_like(y_TN)
        expand_token_kernel[(num_tokens, cdiv(num_results, TOKEN_RESULTS))](
            *(y_TN, z, b_SNR, ranks_SM, slots_T, out_TN, num_tokens),
            NUM_SPLITS=num_splits,
            BLOCK_S=next_power_of_2(num_splits),
            BLOCK_N=TOKEN_RESULTS,
            BLOCK_R=TOKEN_RANKS,
            **of_expand,
        )
        return out_TN
    most_ranks = MOST_RANKS if x_TK.dtype != torch.float32 else MOST_RANKS // 4  # no tensor cores, and longer programs
    block_r = min(most_ranks, max(16, next_power_of_2(num_slots * rows)))
    block_rank = next_power_of_2(rank)
    tiles, row_tiles = cdiv(num_tokens, BLOCK_TOKENS), cdiv(num_slots * rows, block_r)
    num_splits = min(MOST_SPLITS, k // BLOCK_COLUMNS, next_power_of_2(cdiv(ENOUGH_PROGRAMS, tiles * row_tiles)))
    split_columns = cdiv(cdiv(k, max(1, num_splits)), BLOCK_COLUMNS) * BLOCK_COLUMNS
    num_splits = cdiv(k, split_columns)
    z = torch.empty((num_splits, num_tokens, rows), dtype=torch.float32, device=x_TK.device)
    shrink_kernel[(tiles, row_tiles, num_splits)](
        *(x_TK, a_SRK, ranks_SM, slots_T, z, num_tokens),
        NUM_SLOTS=num_slots,
        SPLIT_COLUMNS=split_columns,
        BLOCK_T=BLOCK_TOKENS,
        BLOCK_R=block_r,
        BLOCK_K=BLOCK_COLUMNS,
        **of_shrink,
    )
    last_tiles = tuple(accumulate(cdiv(size, BLOCK_RESULTS) for size in sizes))
    out_TN = torch.empty_like(y_TN)
    expand_kernel[(tiles, last_tiles[-1])](
        *(y_TN, z, b_SNR, ranks_SM, slots_T, out_TN, num_tokens),
        FIRST_TILES=(0, *last_tiles[:-1]),
        NUM_SLOTS=num_slots,
        NUM_SPLITS=num_splits,
        BLOCK_T=BLOCK_TOKENS,
        BLOCK_N=BLOCK_RESULTS,
        BLOCK_S=max(1, min(most_ranks, max(16, next_power_of_2(num_slots) * block_rank)) // block_rank),
        BLOCK_R=block_rank,
        **of_expand,
    )
    return out_TN


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
