"""The gate between the two linears of experts: reference, device function and matcher.

With a limit it is the clamped gate of GPT-OSS (OpenAI 2025): gate * sigmoid(alpha * gate) * (up + 1).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import fx

from compiled_engine.passes.framework.matching import ACTIVATIONS, arg, aten, factors, is_call
from compiled_engine.passes.linear.silu_mul import activate, activation_of, gated


@dataclass(frozen=True)
class Gate:
    """The gate activation(gate) * up or, with a limit, the clamped gate in this module's docstring."""

    activation: str = "silu"
    alpha: float = 0.0
    limit: float = 0.0  # of clamped values; 0: none
    # rows of the first weight alternate between gate and up, otherwise all of gate come first
    interleaved: bool = False

    def __call__(self, gate_up_TI2: torch.Tensor) -> torch.Tensor:
        """Apply the gate to the first linear's result: [T, 2 I] -> [T, I], rounded to its dtype after each op."""
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
    """Return the gate's result for gate and up, all in fp32; see `Gate`.

    The activated gate is rounded to the dtype before it is multiplied by up.
    """
    if LIMIT == 0:
        return gated(gate, up, ACTIVATION, dtype)
    else:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        activated = gate * tl.sigmoid(ALPHA * gate)
        return activated.to(dtype).to(tl.float32) * (up + 1).to(dtype).to(tl.float32)


def match_gate(hidden: fx.Node) -> tuple[fx.Node, Gate] | str:
    """Return (first linear's result, gate) if `hidden` is a gate of the result's two parts; otherwise why it is not."""
    for activated, up in factors(hidden):
        if is_call(activated, *ACTIVATIONS):
            halves = _halves(arg(activated, 0), up)
            if halves is None:
                return "gate and up are not the two halves of one product"
            return halves[0], Gate(activation_of(activated), interleaved=halves[1])
    for activated, raised in factors(hidden):
        found = _clamped(activated, raised)
        if found is not None:
            return found
    return "what goes into the second product is neither silu or gelu(gate) * up nor the gate of clamped values"


def _clamped(activated: fx.Node, raised: fx.Node) -> tuple[fx.Node, Gate] | None:
    """Return (first linear's result, clamped gate) if these are its two factors; otherwise None.

    activated: gate * sigmoid(alpha * gate). raised: up + 1. Both must be of clamped values.
    """
    if not (is_call(raised, aten.add.Tensor) and raised.args[1:] in ((1,), (1.0,)) and not raised.kwargs):
        return None
    up: Any = raised.args[0]
    for gate, curve in factors(activated):
        scaled: Any = curve.args[0] if is_call(curve, aten.sigmoid.default) else None
        if not (
            is_call(scaled, aten.mul.Tensor) and scaled.args[0] is gate and isinstance(scaled.args[1], int | float)
        ):
            continue
        if not (is_call(gate, aten.clamp.default) and is_call(up, aten.clamp.default)):
            continue
        limit: Any = gate.args[2]
        halves = _halves(arg(gate, 0), arg(up, 0))
        if gate.args[1] is None and limit and up.args[1:] == (-limit, limit) and halves is not None:
            return halves[0], Gate("silu", float(scaled.args[1]), float(limit), halves[1])
    return None


def _halves(gate: Any, up: Any) -> tuple[fx.Node, bool] | None:
    """Return (value, interleaved) if gate and up are a value's halves, or its alternate columns; otherwise None."""
    if all(is_call(half, aten.slice.Tensor) and len(half.args) == 5 for half in (gate, up)):
        product = gate.args[0]
        dim, size = product.meta["val"].dim() - 1, product.meta["val"].shape[-1]
        wanted = [(half.args[1] in (-1, dim), half.args[2], half.args[3] >= size, half.args[4]) for half in (gate, up)]
        return (product, True) if up.args[0] is product and wanted == [(True, i, True, 2) for i in range(2)] else None
    if not all(is_call(half, operator.getitem) and half.args[1] == i for i, half in enumerate((gate, up))):
        return None
    split = gate.args[0]
    if up.args[0] is not split or not is_call(split, aten.split.Tensor) or len(split.meta["val"]) != 2:
        return None
    first, second = (half.shape[-1] for half in split.meta["val"])
    return (split.args[0], False) if split.args[2:] in ((-1,), (2,)) and first == second else None
