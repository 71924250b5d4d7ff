"""The op that adds the requests' adapters to the result of a linear.

y[t] + B[s] A[s] x[t], where s is the slot of token t's adapter: a token has one adapter or none. Slots hold A and B at
the largest rank; `ranks_SM` says how much of that each adapter uses, so a batch may mix ranks. What is beyond counts as
zero. A scale is multiplied into B when an adapter is placed.

There are two kernels: the first (shrink) computes z = A x for all members of a merged linear at once, the second
(expand) adds B z. Few tokens and many have kernels of their own. Nothing is sorted or counted on the host, and the
grids depend on shapes alone, so CUDA graphs hold them.

What depends on slots alone is asked for before a kernel waits for the one before it. That is allowed since slots are
parameters, and a kernel that starts no other early writes the tokens' slots; every program waits before it ends.

The grouping by slots follows Punica's and S-LoRA's kernels (Chen et al., arXiv:2310.18547; Sheng et al.,
arXiv:2311.03285).
"""

from __future__ import annotations

from itertools import accumulate

import torch

from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.linear.adapter_operands import Operands
from compiled_engine.passes.linear.adapter_tile_kernels import WINDOWS, add_by_tile, choose_tiles
from compiled_engine.passes.linear.adapter_token_kernels import add_by_token

# Up to this many tokens, a program has one.
FEW_TOKENS = 16
# The most tokens of each way to add; there is one more for more tokens.
TOKEN_COUNTS = (FEW_TOKENS, *WINDOWS)


def reference(
    y_TN: torch.Tensor,
    x_TK: torch.Tensor,
    a_SRK: torch.Tensor,
    b_SNR: torch.Tensor,
    ranks_SM: torch.Tensor,
    slots_T: torch.Tensor,
    sizes: list[int],
) -> torch.Tensor:
    """y + B[slot] A[slot] x for each token; y where the slot is negative. What a token's adapter does not use never
    reaches its sum, where zero would not be enough: zero times NaN is NaN.

    x_TK, y_TN: input and result of a linear, which consists of M members with these sizes. a_SRK: for each slot and
    member `rank` rows, of which the first ranks_SM count, int32. b_SNR: [slots, N, rank]. slots_T: int32.
    """
    rank, ends = b_SNR.shape[2], list(accumulate(sizes))
    out_TN = y_TN.clone(memory_format=torch.contiguous_format)
    for slot in slots_T.unique().tolist():
        if slot < 0:
            continue
        (own,) = (slots_T == slot).nonzero(as_tuple=True)
        x_OK = x_TK[own]
        for member, (used, size, end) in enumerate(zip(ranks_SM[slot].tolist(), sizes, ends, strict=True)):
            if used:
                a_RK, b_NR = a_SRK[slot, member * rank :][:used], b_SNR[slot, end - size : end, :used]
                out_TN[own, end - size : end] += (x_OK @ a_RK.t()) @ b_NR.t()
    return out_TN


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
    tiles = choose_tiles(len(y_TN), k, rows, b_SNR.shape[2], num_slots, x_TK.dtype)
    return add_by_tile(operands, tiles)


def _fake(y_TN: torch.Tensor, *others: object) -> torch.Tensor:
    return torch.empty_like(y_TN, memory_format=torch.contiguous_format)


# Not taken apart for Inductor on a CPU: which matrices are multiplied depends on the tokens' slots.
adapter_add = define_op(
    "adapter_add(Tensor y_TN, Tensor x_TK, Tensor a_SRK, Tensor b_SNR, Tensor ranks_SM, Tensor slots_T, int[] sizes)"
    " -> Tensor",
    cpu=reference,
    cuda=launch,
    fake=_fake,
)
