"""Computes an embedding whose vocabulary is divided among ranks: each rank has the rows of its own tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches


@quick_launches
@triton.jit(do_not_specialize=["first_row", "num_rows"])
def embedding_part_kernel(
    weight_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first_row: tl.tensor,
    num_rows: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Embed tokens: program (token) copies the token's row of weights, or writes zeros if another rank has the row.

    weight_ptr: [num_rows, D], the rows from first_row on; ids_ptr: [T]; out_ptr: [T, D].
    """
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column_D = tl.arange(0, BLOCK_D)
    row = tl.load(ids_ptr + token).to(tl.int64) - first_row
    is_here = (row >= 0) & (row < num_rows)
    inside_D = column_D < D
    value_D = tl.load(weight_ptr + row * D + column_D, inside_D & is_here, other=0.0)
    tl.store(out_ptr + token * D + column_D, value_D, inside_D)


def reference(weight_VD: torch.Tensor, ids_T: torch.Tensor, rank: int) -> torch.Tensor:
    """Return each token's row of weight_VD, the rows that rank `rank` has; zeros for tokens of other ranks: [T, D]."""
    row_T = ids_T - rank * weight_VD.shape[0]
    is_here_T = (row_T >= 0) & (row_T < weight_VD.shape[0])
    return weight_VD[torch.where(is_here_T, row_T, 0)].masked_fill_(~is_here_T.unsqueeze(-1), 0.0)


def embedding_part(weight_VD: torch.Tensor, ids_T: torch.Tensor, rank: int) -> torch.Tensor:
    """Return each token's row of weight_VD, or zeros if another rank has the row: [T, D]; see `reference`.

    On a GPU a kernel computes the result.
    """
    if weight_VD.device.type != "cuda":
        return reference(weight_VD, ids_T, rank)
    num_rows, hidden_size = weight_VD.shape
    out_TD = weight_VD.new_empty((ids_T.shape[0], hidden_size))
    block = next_power_of_2(hidden_size)
    embedding_part_kernel[(ids_T.shape[0],)](
        weight_VD,
        ids_T,
        out_TD,
        rank * num_rows,
        num_rows,
        D=hidden_size,
        BLOCK_D=block,
        num_warps=max(1, min(16, block // 512)),
        **dependent_launch(weight_VD.device),
    )
    return out_TD
