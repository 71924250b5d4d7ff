"""Triton kernel that adds the partial sums of a linear whose columns were split among programs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import cdiv, dependent_launch
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.linear.small_batch_linear_gemv import finish

# Outputs of a program.
_OUTPUTS = 256


@quick_launches
@triton.jit(do_not_specialize=["num_tokens"])
def sum_splits_kernel(
    partials_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_outputs: tl.tensor,
    num_tokens: tl.tensor,
    SPLITS: tl.constexpr,
    SILU_MUL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Write the sum of all splits plus bias, or with SILU_MUL ACTIVATION(gate) * up of its halves; add the residual.

    Program (OUTPUTS outputs, token). partials_ptr: fp32 [SPLITS, num_tokens, N], where N is num_outputs, or twice that
    with SILU_MUL. bias_ptr: [N], or None. out_ptr: [num_tokens, num_outputs]. residual_ptr: like out_ptr, or None.
    """
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1)
    output_M = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    mask_M = output_M < num_outputs
    num_rows = num_outputs * 2 if SILU_MUL else num_outputs
    RESIDUAL: tl.constexpr = residual_ptr is not None
    residual_M = None
    if RESIDUAL:
        residual_M = tl.load(residual_ptr + token * num_outputs + output_M, mask=mask_M, other=0.0)
    sum_M = tl.zeros([OUTPUTS], tl.float32)
    up_M = tl.zeros([OUTPUTS], tl.float32)
    for split in tl.static_range(SPLITS):
        first = (split * num_tokens + token) * num_rows
        sum_M += tl.load(partials_ptr + first + output_M, mask=mask_M, other=0.0)
        if SILU_MUL:
            up_M += tl.load(partials_ptr + first + num_outputs + output_M, mask=mask_M, other=0.0)
    if bias_ptr is not None:
        sum_M += tl.load(bias_ptr + output_M, mask=mask_M, other=0.0).to(tl.float32)
        if SILU_MUL:
            up_M += tl.load(bias_ptr + num_outputs + output_M, mask=mask_M, other=0.0).to(tl.float32)
    offsets_M = token * num_outputs + output_M
    finish(sum_M, up_M, residual_M, out_ptr, offsets_M, mask_M, SILU_MUL, ACTIVATION, RESIDUAL)


def sum_splits(
    partials_STN: torch.Tensor,
    bias_N: torch.Tensor | None,
    residual_TM: torch.Tensor | None,
    gated: bool,
    activation: str,
    out_TM: torch.Tensor,
) -> None:
    """Write y + residual to out_TM. y, [T, N], is the sum of the splits plus the bias.

    With `gated`, activation(gate) * up replaces y, where gate and up are the halves of y. bias_N and residual_TM may be
    None.
    """
    splits, num_tokens, _ = partials_STN.shape
    outputs = out_TM.shape[1]
    sum_splits_kernel[(cdiv(outputs, _OUTPUTS), num_tokens)](
        partials_STN,
        bias_N,
        residual_TM,
        out_TM,
        outputs,
        num_tokens,
        SPLITS=splits,
        SILU_MUL=gated,
        ACTIVATION=activation,
        OUTPUTS=_OUTPUTS,
        num_warps=4,
        **dependent_launch(out_TM.device),
    )
