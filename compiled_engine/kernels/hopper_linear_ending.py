"""What Hopper's linear makes of its products: the sum over parts of K, gate and up."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from compiled_engine.kernels.hopper_linear_ring import ROWS


@gluon.jit
def sum_of_parts(acc, FORM: gl.constexpr):  # type: ignore[no-untyped-def]
    """[ROWS, parts * tokens] -> [ROWS / parts, tokens]: the blocks in which weight and tokens are of the same part."""
    parts: gl.constexpr = FORM.parts
    part_of_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc.type.layout)) // (ROWS // parts)
    part_of_token = gl.arange(0, parts * FORM.tokens, layout=gl.SliceLayout(0, acc.type.layout)) // FORM.tokens
    acc = gl.where(part_of_row[:, None] == part_of_token[None, :], acc, 0.0)
    return gl.sum(gl.sum(acc.reshape([parts, ROWS // parts, parts, FORM.tokens]), 2), 0)


@gluon.jit
def gated(gate, up, dtype: gl.constexpr, ACTIVATION: gl.constexpr):  # type: ignore[no-untyped-def]
    """activation(gate) * up in fp32, rounded where the textbook rounds: see silu_mul."""
    gate = gate.to(dtype).to(gl.float32)
    if ACTIVATION == "silu":
        activated = gate / (1 + gl.exp2(gate * -1.4426950408889634))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is 1 / (1 + exp(-2 z)).
        inner = gate + 0.044715 * gate * gate * gate
        activated = gate / (1 + gl.exp2(inner * -2.302208198144325))
    else:
        activated = 0.5 * gate * (1 + gl.erf(gate * 0.7071067811865476))
    return activated.to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)
