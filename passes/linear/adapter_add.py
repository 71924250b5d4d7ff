"""The op that adds LoRA adapters to the result of a linear: y[t] + B[s] A[s] x[t], where s is token t's adapter slot.

A token has one adapter or none. A slot has room for an adapter of the largest rank, and `ranks_SM` has the ranks in
use, so a batch may mix ranks. The adapter's scale is multiplied into B when the adapter is loaded into a slot.

Two kernels run. Shrink computes z = A x, at once for all members of a merged linear: the linears that were merged into
it, each with an A and a B of its own. Expand adds B z. There are different kernels for few and for many tokens. Grids
depend only on shapes, and the host neither sorts nor counts tokens, so CUDA graphs can hold the kernels.

Before waiting for the previous kernel (programmatic dependent launch), kernels already load data that depends only on
the slots. This is safe because slots are parameters, and the kernel that writes the tokens' slot numbers does not let
the next one start early. Every program waits before it ends.

Grouping by slot follows Punica's and S-LoRA's kernels (Chen et al., arXiv:2310.18547; Sheng et al., arXiv:2311.03285).
"""

from __future__ import annotations

from itertools import accumulate

import torch

from compiled_engine.passes.framework.op_library import define_op
from compiled_engine.passes.linear.adapter_operands import Operands
from compiled_engine.passes.linear.adapter_tile_kernels import WINDOWS, add_by_tile, choose_tiles
from compiled_engine.passes.linear.adapter_token_kernels import add_by_token

# Up to this many tokens, each program handles one token.
FEW_TOKENS = 16
# Largest token count of each kernel configuration; beyond the last there is one more.
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
    """Return y + B[slot] A[slot] x for each token, and y for a token whose slot is negative: [T, N].

    x_TK, y_TN: input and result of a linear into which M linears, the members, are merged. sizes: outputs per member.
    a_SRK: A of each slot, `rank` rows for each member. b_SNR: B of each slot, [N, rank].
    ranks_SM: int32, the rank in use for each slot and member. Rows of A and columns of B beyond this rank are left out,
    since a multiplication of x by zeros would let NaN through.
    slots_T: int32, the slot of each token.
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
    """Return y plus the tokens' LoRA adapters applied to x, [T, N], computed by the kernels; see `reference`.

    All tensors but x and y must be contiguous.
    """
    operands = Operands(y_TN.contiguous(), x_TK.contiguous(), a_SRK, b_SNR, ranks_SM, slots_T, sizes)
    num_slots, rows, k = a_SRK.shape
    if len(y_TN) <= FEW_TOKENS:
        return add_by_token(operands)
    tiles = choose_tiles(len(y_TN), k, rows, b_SNR.shape[2], num_slots, x_TK.dtype)
    return add_by_tile(operands, tiles)


# Without a reference for Inductor on CPUs: the matrices to multiply depend on the values of slots.
adapter_add = define_op(
    "adapter_add(Tensor y_TN, Tensor x_TK, Tensor a_SRK, Tensor b_SNR, Tensor ranks_SM, Tensor slots_T, int[] sizes)"
    " -> Tensor",
    cpu=reference,
    cuda=launch,
    fake=lambda y_TN: torch.empty_like(y_TN, memory_format=torch.contiguous_format),
)
