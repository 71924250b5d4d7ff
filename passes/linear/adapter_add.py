"""The op that adds the requests' adapters to the result of a linear, and its two kernels.

y[t] + B[s] A[s] x[t], where s is the slot of token t's adapter: a token has one adapter or none. Slots hold A and B at
the largest rank; `ranks_SM` says how much of that each adapter uses, and the kernels read no more, so a batch may mix
ranks. A scale is multiplied into B when an adapter is placed.

The first kernel (shrink) computes z = A x for all members of a merged linear at once, the second one (expand) adds B z.
A program of the first has a tile of tokens and a slot, and ends at once if none of the tokens has that slot; one of the
second goes through the slots that its tokens have. Nothing is sorted or counted, on the host or on the device, and the
grids depend on shapes alone, so CUDA graphs hold them. The grouping by tiles follows Punica's and S-LoRA's kernels
(Chen et al., arXiv:2310.18547; Sheng et al., arXiv:2311.03285).
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

# Up to this many tokens, tiles have the least number of tokens that tensor cores take.
FEW_TOKENS = 64
# Columns of x that a program of the first kernel reads at least, and the programs that are worth splitting for.
LEAST_COLUMNS, ENOUGH_PROGRAMS = 256, 128


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
    for slot in range(NUM_SLOTS):
        mine_T = slot_T == slot
        if tl.max(mine_T.to(tl.int32), 0) > 0:
            for member in tl.static_range(MEMBERS):
                rank = tl.load(ranks_ptr + slot * MEMBERS + member)
                if (result < ENDS[member]) & (result + BLOCK_N > BEGINS[member]) & (rank > 0):
                    of_member_N = (result_N >= BEGINS[member]) & (result_N < ENDS[member])
                    for first in tl.static_range(0, RANK, BLOCK_R):
                        if first < rank:
                            r_R = first + tl.arange(0, BLOCK_R)
                            used_R = (r_R < rank) & (r_R < RANK)
                            z_TR = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
                            for split in range(0, num_splits):
                                place_T = (split * num_tokens + token_T).to(tl.int64) * (RANK * MEMBERS)
                                z_TR += tl.load(
                                    z_ptr + place_T[:, None] + (member * RANK + r_R)[None, :],
                                    mask=mine_T[:, None] & used_R[None, :],
                                    other=0.0,
                                )
                            b_RN = tl.load(
                                b_ptr + (slot * N + result_N[None, :]).to(tl.int64) * RANK + r_R[:, None],
                                mask=used_R[:, None] & of_member_N[None, :],
                                other=0.0,
                            )
                            sum_TN = tl.dot(z_TR.to(b_RN.dtype), b_RN, sum_TN, input_precision="ieee")
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
    rank = b_SNR.shape[2]
    few = num_tokens <= FEW_TOKENS
    block_t = 16 if few else 64
    tiles = cdiv(num_tokens, block_t)
    block_k = 128 if few else 64
    most_splits = max(1, min(k // LEAST_COLUMNS, ENOUGH_PROGRAMS // tiles))
    split_columns = cdiv(cdiv(k, most_splits), block_k) * block_k
    num_splits = cdiv(k, split_columns)
    z = torch.empty((num_splits, num_tokens, rows), dtype=torch.float32, device=x_TK.device)
    out_TN = torch.empty_like(y_TN)
    dependent = dependent_launch(x_TK.device)
    shrink_kernel[(tiles, num_slots, num_splits)](
        x_TK,
        a_SRK,
        ranks_SM,
        slots_T,
        z,
        num_tokens,
        split_columns,
        K=k,
        RANK=rank,
        MEMBERS=len(sizes),
        BLOCK_T=block_t,
        BLOCK_R=min(64, max(16, next_power_of_2(rows))),
        BLOCK_K=block_k,
        **dependent,
    )
    block_n = 64 if few else 128
    expand_kernel[(tiles, cdiv(num_results, block_n))](
        y_TN,
        z,
        b_SNR,
        ranks_SM,
        slots_T,
        out_TN,
        num_tokens,
        num_splits,
        N=num_results,
        RANK=rank,
        BEGINS=(0, *accumulate(sizes[:-1])),
        ENDS=tuple(accumulate(sizes)),
        NUM_SLOTS=num_slots,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        BLOCK_R=min(64, max(16, next_power_of_2(rank))),
        **dependent,
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
