"""The first half of an adapter: z = A[s] x for the slot s of each token, for all members of a merged linear at once.

Slots hold A at the largest rank; `ranks_SM` says how much of that each adapter uses, and the kernels read and write no
more, so a batch may mix ranks. Nothing is sorted or counted, and grids depend on shapes alone, so CUDA graphs hold
them. K is split between programs, and z has a part for each split; whoever reads z adds them up.

- For few tokens a program has one token, so that all it reads follows from the token's slot. It reads A before it waits
  for earlier kernels (programmatic dependent launch). It can compute the norm of its token as well.
- For more a program has a tile of tokens and a slot, uses tensor cores, and ends if none of the tokens has the slot.

The grouping by tiles follows Punica's and S-LoRA's kernels (Chen et al., arXiv:2310.18547; Sheng et al.,
arXiv:2311.03285).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.norm import rms_norm

# Up to this many tokens a program has one: more of them read A too often.
TOKEN_PROGRAMS = 16
# Columns of a split of the ops here, whose number must not depend on the number of tokens.
SPLIT_COLUMNS = 512
# Ranks that a program with one token reads together.
TOKEN_RANKS = 16
# The tile of a program with several tokens: tokens and columns.
TILE_TOKENS, TILE_COLUMNS = 64, 64


@quick_launches
@triton.jit(do_not_specialize=["num_tokens", "x_stride", "eps"])
def shrink_token_kernel(
    x_ptr: tl.tensor,
    a_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    z_ptr: tl.tensor,
    norm_weight_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    num_tokens: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    RANK: tl.constexpr,
    MEMBERS: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Program (token, split of K, member): z[split, token, member * RANK + r] of the ranks that its adapter uses.

    NORM: A is multiplied with RMSNorm(x) * norm_weight, which is stored too. WIDTH: a power of two, K or beyond.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    token = tl.program_id(0)
    split = tl.program_id(1)
    member = tl.program_id(2)
    slot = tl.load(slots_ptr + token)
    rank = tl.load(ranks_ptr + slot * MEMBERS + member, mask=slot >= 0, other=0)
    column_K = split * BLOCK_K + tl.arange(0, BLOCK_K)
    inside_K = column_K < K
    row_ptr = a_ptr + (slot * MEMBERS + member).to(tl.int64) * RANK * K
    r_R = tl.arange(0, BLOCK_R)
    a_RK = tl.load(
        row_ptr + r_R[:, None] * K + column_K[None, :], mask=(r_R < rank)[:, None] & inside_K[None, :], other=0.0
    )
    if NORM:
        weight_K = tl.load(norm_weight_ptr + column_K, mask=inside_K, other=0.0).to(tl.float32)
    if DEPENDENT_LAUNCH:
        gdc_wait()
    x_row_ptr = x_ptr + token.to(tl.int64) * x_stride
    x_K = tl.load(x_row_ptr + column_K, mask=inside_K, other=0.0).to(tl.float32)
    if NORM:
        dtype: tl.constexpr = normed_ptr.dtype.element_ty
        all_W = tl.arange(0, WIDTH)
        x_W = tl.load(x_row_ptr + all_W, mask=all_W < K, other=0.0).to(tl.float32)
        x_K *= tl.rsqrt(tl.sum(x_W * x_W, 0) / K + eps)
        if not WIDE:
            x_K = x_K.to(dtype).to(tl.float32)
        if OFFSET != 0:
            weight_K += OFFSET
        rounded_K = (x_K * weight_K).to(dtype)
        if member == 0:
            tl.store(normed_ptr + token.to(tl.int64) * K + column_K, rounded_K, mask=inside_K)
        x_K = rounded_K.to(tl.float32)
    place = (split * num_tokens + token).to(tl.int64) * (RANK * MEMBERS) + member * RANK
    for first in tl.static_range(0, RANK, BLOCK_R):
        if first < rank:
            used_R = first + r_R < rank
            if first > 0:
                a_RK = tl.load(
                    row_ptr + (first + r_R)[:, None] * K + column_K[None, :],
                    mask=used_R[:, None] & inside_K[None, :],
                    other=0.0,
                )
            tl.store(z_ptr + place + first + r_R, tl.sum(a_RK.to(tl.float32) * x_K[None, :], 1), mask=used_R)


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
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.program_id(1)
    split = tl.program_id(2)
    mine_T = tl.load(slots_ptr + token_T, mask=token_T < num_tokens, other=-1) == slot
    # Also where nothing is to be done: the next kernel may rely on everything before this one having ended.
    if DEPENDENT_LAUNCH:
        gdc_wait()
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


def own_products(
    x_TK: torch.Tensor, a_SRK: torch.Tensor, ranks_SM: torch.Tensor, slots_T: torch.Tensor
) -> torch.Tensor:
    """[T, M, rank]: A[slot] x of each member, zeros beyond the adapter's rank and without a slot."""
    num_slots, num_members = ranks_SM.shape
    rank = a_SRK.shape[1] // num_members
    z_TSMR = (x_TK @ a_SRK.flatten(0, 1).t()).unflatten(1, (num_slots, num_members, rank))
    chosen_TS = slots_T.unsqueeze(1) == torch.arange(num_slots, device=slots_T.device)
    used_SMR = torch.arange(rank, device=slots_T.device) < ranks_SM.unsqueeze(2)
    return torch.where(chosen_TS[:, :, None, None] & used_SMR, z_TSMR, 0.0).sum(1)


def reference(x_TK: torch.Tensor, a_SRK: torch.Tensor, ranks_SM: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
    """[splits, T, M * rank], fp32: the sum over the splits is A[slot] x of each member.

    a_SRK: for each slot and member `rank` rows, of which the first ranks_SM count, int32. slots_T: int32, negative
    without a slot. The kernels leave undefined what does not count.
    """
    z_TR = own_products(x_TK, a_SRK, ranks_SM, slots_T).flatten(1).float()
    z_1TR = z_TR.unsqueeze(0)
    return torch.cat([z_1TR, torch.zeros_like(z_1TR).repeat(_splits(x_TK) - 1, 1, 1)])


def normed_reference(
    x_TK: torch.Tensor,
    a_SRK: torch.Tensor,
    ranks_SM: torch.Tensor,
    slots_T: torch.Tensor,
    norm_weight_K: torch.Tensor,
    eps: float,
    norm_offset: float = 0.0,
    norm_wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x, see rms_norm.reference, and what `reference` makes of it."""
    x_TK = rms_norm.reference(x_TK, norm_weight_K, eps, norm_offset, norm_wide)
    return x_TK, reference(x_TK, a_SRK, ranks_SM, slots_T)


def launch(x_TK: torch.Tensor, a_SRK: torch.Tensor, ranks_SM: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
    """The kernels behind `reference`."""
    z_STR = _empty(x_TK, a_SRK)
    if x_TK.shape[0] > TOKEN_PROGRAMS:
        shrink_tiles(x_TK, a_SRK, ranks_SM, slots_T, z_STR, SPLIT_COLUMNS)
    else:
        _shrink_tokens(x_TK, a_SRK, ranks_SM, slots_T, z_STR)
    return z_STR


def launch_normed(
    x_TK: torch.Tensor,
    a_SRK: torch.Tensor,
    ranks_SM: torch.Tensor,
    slots_T: torch.Tensor,
    norm_weight_K: torch.Tensor,
    eps: float,
    norm_offset: float = 0.0,
    norm_wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels behind `normed_reference`: one for few tokens."""
    if x_TK.shape[0] > TOKEN_PROGRAMS:
        normed_TK = rms_norm.launch(x_TK, norm_weight_K, eps, norm_offset, norm_wide)
        return normed_TK, launch(normed_TK, a_SRK, ranks_SM, slots_T)
    normed_TK = torch.empty_like(x_TK, memory_format=torch.contiguous_format)
    z_STR = _empty(x_TK, a_SRK)
    _shrink_tokens(x_TK, a_SRK, ranks_SM, slots_T, z_STR, norm_weight_K, normed_TK, eps, norm_offset, norm_wide)
    return normed_TK, z_STR


def _shrink_tokens(
    x_TK: torch.Tensor,
    a_SRK: torch.Tensor,
    ranks_SM: torch.Tensor,
    slots_T: torch.Tensor,
    z_STR: torch.Tensor,
    norm_weight_K: torch.Tensor | None = None,
    normed_TK: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    norm_wide: bool = False,
) -> None:
    if x_TK.stride(1) != 1:
        x_TK = x_TK.contiguous()
    num_tokens, k = x_TK.shape
    num_members = ranks_SM.shape[1]
    operands = x_TK, a_SRK, ranks_SM, slots_T, z_STR, norm_weight_K, normed_TK
    shrink_token_kernel[(num_tokens, z_STR.shape[0], num_members)](
        *operands,
        num_tokens,
        x_TK.stride(0),
        eps,
        K=k,
        RANK=a_SRK.shape[1] // num_members,
        MEMBERS=num_members,
        NORM=norm_weight_K is not None,
        OFFSET=norm_offset,
        WIDE=norm_wide,
        WIDTH=next_power_of_2(k),
        BLOCK_R=TOKEN_RANKS,
        BLOCK_K=SPLIT_COLUMNS,
        **dependent_launch(x_TK.device),
    )


def shrink_tiles(
    x_TK: torch.Tensor,
    a_SRK: torch.Tensor,
    ranks_SM: torch.Tensor,
    slots_T: torch.Tensor,
    z_STR: torch.Tensor,
    split_columns: int,
) -> None:
    """Fill z with tiles of tokens; split_columns: of each of its splits, a multiple of TILE_COLUMNS."""
    x_TK = x_TK.contiguous()
    num_tokens, k = x_TK.shape
    num_slots, num_members = ranks_SM.shape
    rows = a_SRK.shape[1]
    shrink_kernel[(cdiv(num_tokens, TILE_TOKENS), num_slots, z_STR.shape[0])](
        *(x_TK, a_SRK, ranks_SM, slots_T, z_STR, num_tokens, split_columns),
        K=k,
        RANK=rows // num_members,
        MEMBERS=num_members,
        BLOCK_T=TILE_TOKENS,
        BLOCK_R=min(64, max(16, next_power_of_2(rows))),
        BLOCK_K=TILE_COLUMNS,
        **dependent_launch(x_TK.device),
    )


def _splits(x_TK: torch.Tensor) -> int:
    return cdiv(x_TK.shape[1], SPLIT_COLUMNS)


def _empty(x_TK: torch.Tensor, a_SRK: torch.Tensor, *others: object) -> torch.Tensor:
    return x_TK.new_empty((_splits(x_TK), x_TK.shape[0], a_SRK.shape[1]), dtype=torch.float32)


def _fake_normed(x_TK: torch.Tensor, a_SRK: torch.Tensor, *others: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x_TK, memory_format=torch.contiguous_format), _empty(x_TK, a_SRK)


adapter_shrink = define_op(
    "adapter_shrink(Tensor x_TK, Tensor a_SRK, Tensor ranks_SM, Tensor slots_T) -> Tensor",
    cpu=reference,
    cuda=launch,
    fake=_empty,
    reference=reference,
)
adapter_normed_shrink = define_op(
    "adapter_normed_shrink(Tensor x_TK, Tensor a_SRK, Tensor ranks_SM, Tensor slots_T, Tensor norm_weight_K, float eps,"
    " float norm_offset=0.0, bool norm_wide=False) -> (Tensor, Tensor)",
    cpu=normed_reference,
    cuda=launch_normed,
    fake=_fake_normed,
    reference=normed_reference,
)
