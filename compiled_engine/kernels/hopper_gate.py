"""Gluon functions for linears on Hopper whose weight holds gate and up: the order of rows, and activation(gate) * up.

In a tile, BLOCK rows of gate alternate with the corresponding BLOCK rows of up, so that one thread holds the sums of
both.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Consecutive rows of gate, followed by the same number of rows of up.
BLOCK = gl.constexpr(8)


@gluon.jit
def rows_of_pairs(place_N, first, num_outputs):  # type: ignore[no-untyped-def]
    """Return (output, row of the weight) for each place in a tile of alternating blocks of gate and up.

    place_N: index of each row in the tile. first: index of the tile's first output. num_outputs: rows of gate, which
    precede those of up in the weight.
    """
    output_N = first + place_N // (2 * BLOCK) * BLOCK + place_N % BLOCK
    return output_N, output_N + place_N // BLOCK % 2 * num_outputs


@gluon.jit
def gated(gate, up, dtype: gl.constexpr, ACTIVATION: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return activation(gate) * up in fp32. gate, up: fp32.

    gate, up and the activation's result are rounded to `dtype`, as in textbook models; the product is not.
    """
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
