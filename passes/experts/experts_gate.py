"""The gate between the two products of experts, of clamped values if there is a limit.

The clamped gate is that of GPT-OSS (OpenAI 2025): gate * sigmoid(alpha * gate) * (up + 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from compiled_engine.passes.linear.silu_mul import activate, gated


@dataclass(frozen=True)
class Gate:
    """activation(gate) * up, or, where limit is not 0, the clamped gate. interleaved: the rows of the first weight are
    gate and up in turn, else all of gate before all of up."""

    activation: str = "silu"
    alpha: float = 0.0
    limit: float = 0.0
    interleaved: bool = False

    def __call__(self, gate_up_TI2: torch.Tensor) -> torch.Tensor:
        """[T, I] of the first product [T, 2 I], rounded to its dtype after each op."""
        if self.interleaved:
            gate_TI, up_TI = gate_up_TI2[..., ::2], gate_up_TI2[..., 1::2]
        else:
            gate_TI, up_TI = gate_up_TI2.chunk(2, dim=-1)
        if not self.limit:
            return activate(gate_TI, self.activation) * up_TI
        gate_TI, up_TI = gate_TI.clamp(max=self.limit), up_TI.clamp(-self.limit, self.limit)
        return (up_TI + 1) * (gate_TI * torch.sigmoid(gate_TI * self.alpha))


@triton.jit
def gate_of_experts(
    gate: tl.tensor,
    up: tl.tensor,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """See `Gate`; fp32 in and out, the gate's value rounded to the dtype before the product with up."""
    if LIMIT == 0:
        return gated(gate, up, ACTIVATION, dtype)
    else:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        activated = gate * tl.sigmoid(ALPHA * gate)
        return activated.to(dtype).to(tl.float32) * (up + 1).to(dtype).to(tl.float32)
