"""Experts of batch-invariant engines on a CPU: a token's bits depend on neither the other tokens nor their number.

Linears are the C++ kernel of invariant_linear. The results of a token's experts are added in the order of its top-k.
On a GPU the kernels for tokens sorted by expert do the same, with tiles that add in one order (invariant_tiles).
"""

from __future__ import annotations

import torch

from compiled_engine.kernels.element_functions import sigmoid, softmax, sum_in_halves
from compiled_engine.passes.experts.experts_gate import Gate
from compiled_engine.passes.linear import small_batch_linear_cpu
from compiled_engine.passes.linear.small_batch_linear_cpu import linear_in_order


def why_not(
    gate_up_END: torch.Tensor, down_EDI: torch.Tensor, gate: Gate, device_type: str, *, packed: bool, coded: bool
) -> str | None:
    """Return why experts cannot be batch-invariant; None if they can.

    coded: whether a weight is quantised; packed: whether it has several codes to a byte.
    """
    if packed:
        return "codes of less than 8 bits have kernels that are chosen by the number of tokens"
    if device_type != "cpu":
        return None
    if coded:
        return "codes are decoded by the library on a CPU"
    lanes, widths = small_batch_linear_cpu.LANES, (gate_up_END.shape[2], down_EDI.shape[2])
    if gate_up_END.dtype != torch.float32 or any(width % lanes for width in widths):
        return f"their C++ kernel needs float32 and columns in multiples of {lanes}, not {gate_up_END.dtype}, {widths}"
    if gate.activation not in ("silu", *small_batch_linear_cpu.ACTIVATIONS):
        return f"the library's {gate.activation} computes the last elements of a tensor by other instructions"
    if gate.activation != "silu" and gate.interleaved:
        return f"rows of gate and up alternate, which the C++ kernel of {gate.activation} does not support"
    return None


def weighted_sum(
    x_TD: torch.Tensor,
    logits_TE: torch.Tensor,
    gate_up_END: torch.Tensor,
    down_EDI: torch.Tensor,
    gate_up_bias_EN: torch.Tensor | None,
    down_bias_ED: torch.Tensor | None,
    top_k: int,
    renormalise: bool,
    gate: Gate,
    chosen_TX: torch.Tensor | None,
) -> torch.Tensor:
    """Return for each token the sum of its top_k experts' outputs times their probabilities, [T, D], in float32.

    See experts_op.reference for the arguments. `why_not` must be None for them.
    """
    weights_TX = logits_TE
    if chosen_TX is None:
        weights_TX, chosen_TX = softmax(logits_TE).topk(top_k, dim=-1)
    if renormalise:
        weights_TX = weights_TX / sum_in_halves(weights_TX, -1).unsqueeze(-1)
    y_TXD = x_TD.new_empty((*chosen_TX.shape, x_TD.shape[1]))
    for expert in chosen_TX.unique().tolist():
        token_P, slot_P = torch.where(chosen_TX == expert)
        bias_N, bias_D = (None if bias is None else bias[expert] for bias in (gate_up_bias_EN, down_bias_ED))
        hidden_PI = _gated(x_TD[token_P], gate_up_END[expert].contiguous(), bias_N, gate)
        y_PD = linear_in_order(hidden_PI, down_EDI[expert].contiguous(), bias_D)
        y_TXD[token_P, slot_P] = y_PD * weights_TX[token_P, slot_P, None]
    out_TD = y_TXD[:, 0]
    for slot in range(1, top_k):
        out_TD = out_TD + y_TXD[:, slot]
    return out_TD


def _gated(x_PD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None, gate: Gate) -> torch.Tensor:
    if not gate.limit and not gate.interleaved:
        return linear_in_order(x_PD, weight_ND, bias_N, gate.activation)
    y_PN = linear_in_order(x_PD, weight_ND, bias_N)
    gate_PI, up_PI = (y_PN[:, ::2], y_PN[:, 1::2]) if gate.interleaved else y_PN.chunk(2, dim=-1)
    if not gate.limit:
        return gate_PI * sigmoid(gate_PI) * up_PI
    gate_PI, up_PI = gate_PI.clamp(max=gate.limit), up_PI.clamp(-gate.limit, gate.limit)
    return (up_PI + 1) * (gate_PI * sigmoid(gate_PI * gate.alpha))
