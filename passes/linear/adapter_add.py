"""The op that adds the requests' adapters to the result of a linear: y[t] + B[s] A[s] x[t], where s is the slot of
token t's adapter. A token has one adapter or none. A scale is multiplied into B when an adapter is placed.

adapter_shrink.py computes z = A x, and the kernels here add B z. Two other ops do the same for up to 64 tokens and a
linear whose kernel has an ending for it, see adapter_ending.py.

- For few tokens a program has one token, so that all it reads follows from the token's slot and is asked for at once:
  time is latency there, and B comes from the L2 cache when tokens share a slot.
- For more a program has a tile of tokens and tensor cores, and goes through the slots that its tokens have. It computes
  the activation behind the linear as well, which saves a write and a read of the widest tensor of the model.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.linear import adapter_ending, adapter_shrink, silu_mul
from compiled_engine.passes.linear.adapter_ending import Adapted
from compiled_engine.passes.linear.adapter_shrink import TILE_COLUMNS, TILE_TOKENS, own_products, shrink_tiles
from compiled_engine.passes.linear.silu_mul import gated

# Up to this many tokens, a program has one.
FEW_TOKENS = 64
# The tiles of such a program: results, and the ranks that are read together.
TOKEN_RESULTS, TOKEN_RANKS = 256, 16
# Columns of x that a program of shrink with a tile of tokens reads at least, and the programs that are worth splitting
# for.
LEAST_COLUMNS, ENOUGH_PROGRAMS = 256, 512


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
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Program (token, tile of results): y + B z. BLOCK_S: SPLITS or a power of two beyond."""
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    MEMBERS: tl.constexpr = len(ENDS)
    token = tl.program_id(0)
    result = tl.program_id(1) * BLOCK_N
    result_N = result + tl.arange(0, BLOCK_N)
    slot = tl.load(slots_ptr + token)
    if DEPENDENT_LAUNCH:
        gdc_wait()
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
                            mask=(split_S < SPLITS)[:, None] & used_R[None, :],
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


@triton.jit
def _expanded(
    y_ptr: tl.tensor,
    z_ptr: tl.tensor,
    b_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    token_T: tl.tensor,
    slot_T: tl.tensor,
    result: tl.tensor,
    end: tl.tensor,
    num_tokens: tl.tensor,
    num_splits: tl.tensor,
    N: tl.constexpr,
    RANK: tl.constexpr,
    BEGINS: tl.constexpr,
    ENDS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> tl.tensor:
    """y + B z of a tile of tokens and the results from `result` on, up to `end`, in fp32."""
    MEMBERS: tl.constexpr = len(ENDS)
    BLOCK_T: tl.constexpr = token_T.shape[0]
    result_N = result + tl.arange(0, BLOCK_N)
    place_TN = token_T[:, None].to(tl.int64) * N + result_N[None, :]
    mask_TN = (token_T < num_tokens)[:, None] & (result_N < end)[None, :]
    sum_TN = tl.load(y_ptr + place_TN, mask=mask_TN, other=0.0).to(tl.float32)
    least = tl.min(tl.where(slot_T < 0, SLOTS, slot_T), 0)
    for member in tl.static_range(MEMBERS):
        if (result < ENDS[member]) & (result + BLOCK_N > BEGINS[member]):
            of_member_N = (result_N >= BEGINS[member]) & (result_N < tl.minimum(end, ENDS[member]))
            rank_T = tl.load(ranks_ptr + slot_T * MEMBERS + member, mask=slot_T >= 0, other=0)
            for first in tl.static_range(0, RANK, BLOCK_R):
                r_R = first + tl.arange(0, BLOCK_R)
                used_TR = r_R[None, :] < rank_T[:, None]
                z_TR = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
                for split in range(0, num_splits):
                    place_T = (split * num_tokens + token_T).to(tl.int64) * (RANK * MEMBERS)
                    z_TR += tl.load(z_ptr + place_T[:, None] + (member * RANK + r_R)[None, :], mask=used_TR, other=0.0)
                for slot in range(least, tl.max(slot_T, 0) + 1):
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
    return sum_TN


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
    SLOTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Program (tile of results, tile of tokens): y + B z, with ACTIVATION of its first half times its second half.

    BEGINS, ENDS: of each member's results. Programs that follow one another have the same tokens, so that z is read
    from memory once.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    token_T = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside_T = token_T < num_tokens
    slot_T = tl.load(slots_ptr + token_T, mask=inside_T, other=-1)
    if DEPENDENT_LAUNCH:
        gdc_wait()
    OUTPUTS: tl.constexpr = N if ACTIVATION is None else N // 2
    result = tl.program_id(0) * BLOCK_N
    sum_TN = _expanded(
        y_ptr,
        z_ptr,
        b_ptr,
        ranks_ptr,
        token_T,
        slot_T,
        result,
        OUTPUTS,
        num_tokens,
        num_splits,
        N,
        RANK,
        BEGINS,
        ENDS,
        SLOTS,
        BLOCK_N,
        BLOCK_R,
    )
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if ACTIVATION is not None:
        up_TN = _expanded(
            y_ptr,
            z_ptr,
            b_ptr,
            ranks_ptr,
            token_T,
            slot_T,
            OUTPUTS + result,
            N,
            num_tokens,
            num_splits,
            N,
            RANK,
            BEGINS,
            ENDS,
            SLOTS,
            BLOCK_N,
            BLOCK_R,
        )
        gate_TN = sum_TN.to(dtype).to(tl.float32)
        sum_TN = gated(gate_TN, up_TN.to(dtype).to(tl.float32), ACTIVATION, dtype)
    result_N = result + tl.arange(0, BLOCK_N)
    place_TN = token_T[:, None].to(tl.int64) * OUTPUTS + result_N[None, :]
    tl.store(out_ptr + place_TN, sum_TN.to(dtype), mask=inside_T[:, None] & (result_N < OUTPUTS)[None, :])


def reference(
    y_TN: torch.Tensor,
    x_TK: torch.Tensor,
    a_SRK: torch.Tensor,
    b_SNR: torch.Tensor,
    ranks_SM: torch.Tensor,
    slots_T: torch.Tensor,
    sizes: list[int],
    activation: str | None = None,
) -> torch.Tensor:
    """y + B[slot] A[slot] x for each token; y where the slot is negative. activation: of the first half of that, times
    the second half, as in silu_mul.

    x_TK, y_TN: input and result of a linear, which consists of M members with these sizes. a_SRK: for each slot and
    member `rank` rows, of which the first ranks_SM count, int32. b_SNR: [slots, N, rank]. slots_T: int32.
    """
    z_STR = own_products(x_TK, a_SRK, ranks_SM, slots_T).flatten(1).unsqueeze(0)
    y_TN = adapter_ending.reference(y_TN, Adapted(z_STR, b_SNR, ranks_SM, slots_T, sizes))
    return y_TN if activation is None else silu_mul.reference(y_TN, activation)


def launch(
    y_TN: torch.Tensor,
    x_TK: torch.Tensor,
    a_SRK: torch.Tensor,
    b_SNR: torch.Tensor,
    ranks_SM: torch.Tensor,
    slots_T: torch.Tensor,
    sizes: list[int],
    activation: str | None = None,
) -> torch.Tensor:
    """The kernels behind `reference`."""
    y_TN = y_TN.contiguous()
    num_tokens, num_results = y_TN.shape
    if num_tokens <= FEW_TOKENS:
        z_STR = adapter_shrink.launch(x_TK, a_SRK, ranks_SM, slots_T)
        sum_TN = _expand_tokens(y_TN, Adapted(z_STR, b_SNR, ranks_SM, slots_T, sizes))
        return sum_TN if activation is None else silu_mul.launch(sum_TN, activation)
    rows, k = a_SRK.shape[1:]
    most_splits = max(1, min(k // LEAST_COLUMNS, ENOUGH_PROGRAMS // cdiv(num_tokens, TILE_TOKENS)))
    split_columns = cdiv(cdiv(k, most_splits), TILE_COLUMNS) * TILE_COLUMNS
    z_STR = torch.empty((cdiv(k, split_columns), num_tokens, rows), dtype=torch.float32, device=x_TK.device)
    shrink_tiles(x_TK, a_SRK, ranks_SM, slots_T, z_STR, split_columns)
    adapted = Adapted(z_STR, b_SNR, ranks_SM, slots_T, sizes)
    outputs = num_results if activation is None else num_results // 2
    out_TN = y_TN.new_empty((num_tokens, outputs))
    block_n = 128 if activation is None else 64
    expand_kernel[(cdiv(outputs, block_n), cdiv(num_tokens, TILE_TOKENS))](
        y_TN,
        out_ptr=out_TN,
        num_tokens=num_tokens,
        num_splits=len(z_STR),
        N=num_results,
        ACTIVATION=activation,
        BLOCK_T=TILE_TOKENS,
        BLOCK_N=block_n,
        BLOCK_R=min(64, max(16, next_power_of_2(b_SNR.shape[2]))),
        **adapted.arguments(),
        **dependent_launch(x_TK.device),
    )
    return out_TN


def _expand_tokens(y_TN: torch.Tensor, adapted: Adapted) -> torch.Tensor:
    num_tokens, num_results = y_TN.shape
    out_TN = torch.empty_like(y_TN)
    expand_token_kernel[(num_tokens, cdiv(num_results, TOKEN_RESULTS))](
        y_TN,
        out_ptr=out_TN,
        num_tokens=num_tokens,
        N=num_results,
        SPLITS=len(adapted.z_STR),
        BLOCK_S=next_power_of_2(len(adapted.z_STR)),
        BLOCK_N=TOKEN_RESULTS,
        BLOCK_R=TOKEN_RANKS,
        **adapted.arguments(),
        **dependent_launch(y_TN.device),
    )
    return out_TN


def _fake(
    y_TN: torch.Tensor,
    x_TK: torch.Tensor,
    a_SRK: torch.Tensor,
    b_SNR: torch.Tensor,
    ranks_SM: torch.Tensor,
    slots_T: torch.Tensor,
    sizes: list[int],
    activation: str | None = None,
) -> torch.Tensor:
    return y_TN.new_empty((y_TN.shape[0], y_TN.shape[1] // (1 if activation is None else 2)))


adapter_add = define_op(
    "adapter_add(Tensor y_TN, Tensor x_TK, Tensor a_SRK, Tensor b_SNR, Tensor ranks_SM, Tensor slots_T, int[] sizes, "
    "str? activation=None) -> Tensor",
    cpu=reference,
    cuda=launch,
    fake=_fake,
    reference=reference,
)
