"""The second half of an adapter as the ending of a kernel that computes a linear: B[s] z is added to its product.

Without it, a linear's neighbours would be kernels of their own in steps with adapters: the sum belongs before an
activation and a residual. B and slots depend on no kernel of the forward, so they are asked for before the wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from compiled_engine.kernels.launch_arguments import next_power_of_2

# Columns of a product of a tile with B of several slots, side by side.
MOST_COLUMNS = 128


class Adapted(NamedTuple):
    """What the ending of a linear reads: z_STR of adapter_shrink, b_SNR [slots, N, rank], ranks_SM, slots_T, and the
    sizes of the linear's members, which make up its N results."""

    z_STR: torch.Tensor
    b_SNR: torch.Tensor
    ranks_SM: torch.Tensor
    slots_T: torch.Tensor
    sizes: Sequence[int]

    def arguments(self) -> dict[str, Any]:
        """The arguments of a kernel that adds B z, beside its tiles and the number of splits."""
        ends = tuple(accumulate(self.sizes))
        return {
            "z_ptr": self.z_STR,
            "b_ptr": self.b_SNR,
            "ranks_ptr": self.ranks_SM,
            "slots_ptr": self.slots_T,
            "RANK": self.b_SNR.shape[2],
            "BEGINS": (0, *ends[:-1]),
            "ENDS": ends,
            "SLOTS": len(self.b_SNR),
        }


def adapted_of(
    z_STR: torch.Tensor | None,
    b_SNR: torch.Tensor | None,
    ranks_SM: torch.Tensor | None,
    slots_T: torch.Tensor | None,
    sizes: Sequence[int],
) -> Adapted | None:
    """Return an op's optional arguments as one; None without adapters."""
    if z_STR is None or b_SNR is None or ranks_SM is None or slots_T is None:
        return None
    return Adapted(z_STR, b_SNR, ranks_SM, slots_T, sizes)


def reference(y_TN: torch.Tensor, adapted: Adapted) -> torch.Tensor:
    """y + B[slot] z for each token; y where the slot is negative. What of z does not count is not read."""
    num_slots, num_members, rank = len(adapted.b_SNR), len(adapted.sizes), adapted.b_SNR.shape[2]
    device = y_TN.device
    z_T1MR = adapted.z_STR.sum(0).to(y_TN.dtype).unflatten(1, (1, num_members, rank))
    chosen_TS = adapted.slots_T.unsqueeze(1) == torch.arange(num_slots, device=device)
    used_SMR = torch.arange(rank, device=device) < adapted.ranks_SM.unsqueeze(2)
    z_TSMR = torch.where(chosen_TS[:, :, None, None] & used_SMR, z_T1MR, 0.0)
    parts = []
    for member, (size, end) in enumerate(zip(adapted.sizes, accumulate(adapted.sizes), strict=True)):
        b_NSR = adapted.b_SNR[:, end - size : end].transpose(0, 1)
        parts.append(z_TSMR[:, :, member].flatten(1) @ b_NSR.flatten(1).t())
    return y_TN + (parts[0] if num_members == 1 else torch.cat(parts, 1))


@triton.jit
def member_of(row_N: tl.tensor, ENDS: tl.constexpr) -> tl.tensor:
    """The member of a merged linear that each row of its weight belongs to."""
    member_N = tl.zeros_like(row_N)
    for member in tl.static_range(len(ENDS) - 1):
        member_N += (row_N >= ENDS[member]).to(tl.int32)
    return member_N


@triton.jit
def _ranks(
    ranks_ptr: tl.tensor, slot: tl.tensor, member_N: tl.tensor, there_N: tl.tensor, MEMBERS: tl.constexpr
) -> tl.tensor:
    """The rank of each row's member in a slot; 0 for a row that is not there, and without a slot."""
    rank_N = tl.load(ranks_ptr + tl.maximum(slot, 0) * MEMBERS + member_N, mask=there_N, other=0)
    return tl.where(slot >= 0, rank_N, 0)


@triton.jit
def own_rows(
    b_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    slot: tl.tensor,
    row_N: tl.tensor,
    there_N: tl.tensor,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ENDS: tl.constexpr,
) -> tl.tensor:
    """Rows of a slot's B as [N, BLOCK_R], with zeros beyond the rank of their member. BLOCK_R: RANK or beyond."""
    rank_N = _ranks(ranks_ptr, slot, member_of(row_N, ENDS), there_N, len(ENDS))
    r_R = tl.arange(0, BLOCK_R)
    place_N = (slot * ENDS[len(ENDS) - 1] + row_N).to(tl.int64) * RANK
    return tl.load(b_ptr + place_N[:, None] + r_R[None, :], mask=r_R[None, :] < rank_N[:, None], other=0.0)


@triton.jit
def times_own(
    z_ptr: tl.tensor,
    b_NR: tl.tensor,
    ranks_ptr: tl.tensor,
    slot: tl.tensor,
    row_N: tl.tensor,
    there_N: tl.tensor,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ENDS: tl.constexpr,
    SPLITS: tl.constexpr,
) -> tl.tensor:
    """B z of the rows that `own_rows` returned, [N], fp32, for a batch of one token."""
    member_N = member_of(row_N, ENDS)
    rank_N = _ranks(ranks_ptr, slot, member_N, there_N, len(ENDS))
    r_R = tl.arange(0, BLOCK_R)
    z_NR = tl.zeros(b_NR.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        place_N = (split * len(ENDS) + member_N) * RANK
        z_NR += tl.load(z_ptr + place_N[:, None] + r_R[None, :], mask=r_R[None, :] < rank_N[:, None], other=0.0)
    return tl.sum(b_NR.to(tl.float32) * z_NR.to(b_NR.dtype).to(tl.float32), 1)


@triton.jit
def times_slots(
    z_ptr: tl.tensor,
    b_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    token_T: tl.tensor,
    num_tokens: tl.tensor,
    row_N: tl.tensor,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BEGINS: tl.constexpr,
    ENDS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
) -> tl.tensor:
    """B z of a tile of tokens and rows of the weight, fp32: [N, T] with ROWS_FIRST, else [T, N].

    The z of a token is put into the columns of its slot, with zeros in those of BLOCK_S - 1 others, and multiplied with
    B of all these slots at once. Slots that no token has are not read.
    """
    MEMBERS: tl.constexpr = len(ENDS)
    COLUMNS: tl.constexpr = BLOCK_S * BLOCK_R
    TOKENS: tl.constexpr = token_T.shape[0]
    ROWS: tl.constexpr = row_N.shape[0]
    slot_T = tl.load(slots_ptr + token_T, mask=token_T < num_tokens, other=-1)
    acc = tl.zeros([ROWS, TOKENS] if ROWS_FIRST else [TOKENS, ROWS], tl.float32)
    column_C = tl.arange(0, COLUMNS)
    for member in tl.static_range(MEMBERS):
        mine_N = (row_N >= BEGINS[member]) & (row_N < ENDS[member])
        if MEMBERS == 1 or tl.max(mine_N.to(tl.int32), 0) > 0:
            rank_T = tl.load(ranks_ptr + slot_T * MEMBERS + member, mask=slot_T >= 0, other=0)
            for first in tl.static_range(0, RANK, BLOCK_R):
                r_R = first + tl.arange(0, BLOCK_R)
                used_TR = r_R[None, :] < rank_T[:, None]
                z_TR = tl.zeros([TOKENS, BLOCK_R], tl.float32)
                for split in tl.static_range(SPLITS):
                    place_T = (split * num_tokens + token_T).to(tl.int64) * (RANK * MEMBERS) + member * RANK
                    z_TR += tl.load(z_ptr + place_T[:, None] + r_R[None, :], mask=used_TR, other=0.0)
                for start in range(0, SLOTS, BLOCK_S):
                    own_TS = slot_T[:, None] == start + tl.arange(0, BLOCK_S)[None, :]
                    present_S = tl.max((own_TS & (rank_T > first)[:, None]).to(tl.int32), 0)
                    if tl.max(present_S, 0) > 0:
                        z_TSR = tl.where(own_TS[:, :, None], z_TR[:, None, :], 0.0)
                        z_TC = tl.reshape(z_TSR, [TOKENS, COLUMNS]).to(b_ptr.dtype.element_ty)
                        present_C = tl.reshape(tl.broadcast_to(present_S[:, None], [BLOCK_S, BLOCK_R]), [COLUMNS]) > 0
                        slot_C = start + column_C // BLOCK_R
                        r_C = first + column_C % BLOCK_R
                        rank_C = tl.load(ranks_ptr + slot_C * MEMBERS + member, mask=present_C, other=0)
                        place_NC = (slot_C[None, :] * ENDS[MEMBERS - 1] + row_N[:, None]).to(tl.int64) * RANK
                        b_NC = tl.load(
                            b_ptr + place_NC + r_C[None, :], mask=mine_N[:, None] & (r_C < rank_C)[None, :], other=0.0
                        )
                        if ROWS_FIRST:
                            acc = tl.dot(b_NC, tl.trans(z_TC), acc, input_precision="ieee")
                        else:
                            acc = tl.dot(z_TC, tl.trans(b_NC), acc, input_precision="ieee")
    return acc


def slot_tile(rank: int, num_slots: int) -> tuple[int, int]:
    """The ranks and the slots of a product of `times_slots`, both powers of two."""
    ranks = min(MOST_COLUMNS, max(16, next_power_of_2(rank)))
    return ranks, max(1, min(MOST_COLUMNS // ranks, next_power_of_2(num_slots)))
