"""What the small-batch linear's kernels share: which rows of the weight are theirs, and what follows the product."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weight_rows(first: tl.tensor, num_outputs: tl.tensor, ROWS: tl.constexpr, SILU_MUL: tl.constexpr) -> tl.tensor:
    """ROWS rows of the weight that the outputs from `first` on are made of; past the last output they repeat.

    With SILU_MUL the weight has num_outputs rows of gate, then as many of up: each gate is followed by its up.
    """
    row_N = tl.arange(0, ROWS)
    if SILU_MUL:
        return tl.minimum(first + row_N // 2, num_outputs - 1) + row_N % 2 * num_outputs
    else:
        return tl.minimum(first + row_N, num_outputs - 1)


@triton.jit
def finish(
    y: tl.tensor,
    row_N: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    bias_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SILU_MUL: tl.constexpr,
) -> None:
    """Bias, then silu(gate) * up or residual + y, rounded where the textbook rounds; then the store.

    y: float32 products [N] or [T, N] with the rows row_N; offsets and mask: of the outputs, [M] or [T, M].
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if BIAS:
        y += tl.load(bias_ptr + row_N).to(tl.float32)
    if SILU_MUL:
        gate, up = tl.split(tl.reshape(y, offsets.shape + [2]))  # noqa: RUF005 (Triton has no star)
        gate = gate.to(dtype).to(tl.float32)
        y = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    if RESIDUAL:
        residual = tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        y = residual + y.to(dtype).to(tl.float32)
    tl.store(out_ptr + offsets, y.to(dtype), mask=mask)
