"""The op that adds the requests' adapters to the result of a linear, and its two kernels.

y[t] + B[s] A[s] x[t], where s is the slot of token t's adapter: a token has one adapter or none. Slots hold A and B at
the largest rank; `ranks_SM` says how much of that each adapter uses, and the kernels read no more, so a batch may mix
ranks. A scale is multiplied into B when an adapter is placed.

The first kernel (shrink) computes z = A x for all members of a merged linear at once, the second one (expand) adds B z.
Nothing is sorted or counted, on the host or on the device, and the grids depend on shapes alone, so CUDA graphs hold
them. There are two pairs:

- For few tokens a program has one token, so that all it reads follows from the token's slot and is asked for at once:
  time is latency there, and A and B come from the L2 cache when tokens share a slot.
- For more a program has a tile of tokens and tensor cores: one of shrink also has a slot, and ends at once if none of
  the tokens has it; one of expand goes through the slots that its tokens have.

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
# Columns of x that a program with a tile of tokens reads at least, and the programs that are worth splitting for.
LEAST_COLUMNS, ENOUGH_PROGRAMS = 256, 512


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
                        z_SR = tl.load(
                            z_ptr + place_S[:, None] + r_R[None, :],
                            mask=(split_S < NUM_SPLITS)[:, None] & used_R[None, :],
                            other=0.0,
                        )
                        z_R = tl.sum(z_SR, 0)
                        b_NR = tl.load(
                            b_ptr + (slot * N + result_N[:, None]).to(tl.int64) * RANK + r_R[None, :],
                            mask=of_member_N[:, None] & used_R[None, :],
                            other=0.0,
                        )
                        sum_N += tl.sum(b_NR.to(tl.float32) * z_R.to(b_NR.dtype).to(tl.float32)[None, :], 1)
    tl.store(out_ptr + place_N, sum_N.to(y_N.dtype), mask=result_N < N)


@quick_launches
@triton.jit(do_not_specialize=["num_tokens", "split_columns"])
def shrink_kernel(
    x_ptr: tl.tensor,
    a_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    z_ptr: tl.tensor,
    num_tokens: tl.tensor,
    split_columns: tl.tensor,
    K: tl.constexpr,
    RANK: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Program (tile of tokens, slot, split of K): z[split, token, member * RANK + r] of its tokens with the slot."""
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.program_id(1)
    split = tl.program_id(2)
    mine_T = tl.load(slots_ptr + token_T, mask=token_T < num_tokens, other=-1) == slot
    if tl.max(mine_T.to(tl.int32), 0) == 0:
        return
    ROWS: tl.constexpr = RANK * MEMBERS
    start = split * split_columns
    for first in tl.static_range(0, ROWS, BLOCK_R):
        row_R = first + tl.arange(0, BLOCK_R)
        rank_R = tl.load(ranks_ptr + slot * MEMBERS + row_R // RANK, mask=row_R < ROWS, other=0)
        used_R = (row_R < ROWS) & (row_R % RANK < rank_R)
        if tl.max(used_R.to(tl.int32), 0) > 0:
            z_TR = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
            for k in range(0, split_columns, BLOCK_K):
                column_K = start + k + tl.arange(0, BLOCK_K)
                inside_K = column_K < K
                x_TK = tl.load(
                    x_ptr + token_T[:, None].to(tl.int64) * K + column_K[None, :],
                    mask=mine_T[:, None] & inside_K[None, :],
                    other=0.0,
                )
                a_KR = tl.load(
                    a_ptr + (slot * ROWS + row_R[None, :]).to(tl.int64) * K + column_K[:, None],
                    mask=used_R[None, :] & inside_K[:, None],
                    other=0.0,
                )
                z_TR = tl.dot(x_TK, a_KR, z_TR, input_precision="ieee")
            place_T = (split * num_tokens + token_T).to(tl.int64) * ROWS
            tl.store(z_ptr + place_T[:, None] + row_R[None, :], z_TR, mask=mine_T[:, None] & used_R[None, :])


@quick_launches
@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def expand_kernel(
    y_ptr: tl.tensor,
    z_ptr: tl.tensor,
    b_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_splits: tl.tensor,
    N: tl.constexpr,
    RANK: tl.constexpr,
    BEGINS: tl.constexpr,
    ENDS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Program (tile of tokens, tile of results): y + B z. BEGINS, ENDS: of each member's results."""
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    MEMBERS: tl.constexpr = len(ENDS)
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    result = tl.program_id(1) * BLOCK_N
    result_N = result + tl.arange(0, BLOCK_N)
    inside_T = token_T < num_tokens
    slot_T = tl.load(slots_ptr + token_T, mask=inside_T, other=-1)
    place_TN = token_T[:, None].to(tl.int64) * N + result_N[None, :]
    mask_TN = inside_T[:, None] & (result_N < N)[None, :]
    y_TN = tl.load(y_ptr + place_TN, mask=mask_TN, other=0.0)
    sum_TN = y_TN.to(tl.float32)
    for member in tl.static_range(MEMBERS):
        if (result < ENDS[member]) & (result + BLOCK_N > BEGINS[member]):
            of_member_N = (result_N >= BEGINS[member]) & (result_N < ENDS[member])
            rank_T = tl.load(ranks_ptr + slot_T * MEMBERS + member, mask=slot_T >= 0, other=0)
            for first in tl.static_range(0, RANK, BLOCK_R):
                r_R = first + tl.arange(0, BLOCK_R)
                used_TR = r_R[None, :] < rank_T[:, None]
                z_TR = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
                for split in range(0, num_splits):
                    place_T = (split * num_tokens + token_T).to(tl.int64) * (RANK * MEMBERS)
                    z_TR += tl.load(z_ptr + place_T[:, None] + (member * RANK + r_R)[None, :], mask=used_TR, other=0.0)
                for slot in range(NUM_SLOTS):
                    mine_T = (slot_T == slot) & (rank_T > first)
                    if tl.max(mine_T.to(tl.int32), 0) > 0:
                        used_R = r_R < tl.load(ranks_ptr + slot * MEMBERS + member)
                        b_RN = tl.load(
                            b_ptr + (slot * N + result_N[None, :]).to(tl.int64) * RANK + r_R[:, None],
                            mask=used_R[:, None] & of_member_N[None, :],
                            other=0.0,
                        )
                        own_TR = tl.where(mine_T[:, None], z_TR, 0.0).to(b_RN.dtype)
                        sum_TN = tl.dot(own_TR, b_RN, sum_TN, input_precision="ieee")
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
    few, block_t, block_k, block_n = num_tokens <= FEW_TOKENS, 64, 64, 128
    tiles = cdiv(num_tokens, block_t)
    most_splits = max(1, min(k // LEAST_COLUMNS, ENOUGH_PROGRAMS // tiles))
    split_columns = TOKEN_COLUMNS if few else cdiv(cdiv(k, most_splits), block_k) * block_k
    num_splits = cdiv(k, split_columns)
    z = torch.empty((num_splits, num_tokens, rows), dtype=torch.float32, device=x_TK.device)
    out_TN = torch.empty_like(y_TN)
    shrunk = x_TK, a_SRK, ranks_SM, slots_T, z, num_tokens
    of_shrink = {"K": k, "RANK": rank, "MEMBERS": len(sizes), **dependent_launch(x_TK.device)}
    expanded = y_TN, z, b_SNR, ranks_SM, slots_T, out_TN, num_tokens
    of_expand = {"N": num_results, "RANK": rank, "BEGINS": begins, "ENDS": ends, **dependent_launch(x_TK.device)}
    if few:
        shrink_token_kernel[(num_tokens, num_splits, len(sizes))](
            *shrunk, BLOCK_R=TOKEN_RANKS, BLOCK_K=TOKEN_COLUMNS, **of_shrink
        )
        expand_token_kernel[(num_tokens, cdiv(num_results, TOKEN_RESULTS))](
            *expanded,
            NUM_SPLITS=num_splits,
            BLOCK_S=next_power_of_2(num_splits),
            BLOCK_N=TOKEN_RESULTS,
            BLOCK_R=TOKEN_RANKS,
            **of_expand,
        )
        return out_TN
    shrink_kernel[(tiles, num_slots, num_splits)](
        *shrunk,
        split_columns,
        BLOCK_T=block_t,
        BLOCK_R=min(64, max(16, next_power_of_2(rows))),
        BLOCK_K=block_k,
        **of_shrink,
    )
    expand_kernel[(tiles, cdiv(num_results, block_n))](
        *expanded,
        num_splits,
        NUM_SLOTS=num_slots,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        BLOCK_R=min(64, max(16, next_power_of_2(rank))),
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
