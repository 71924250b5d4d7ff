"""Replaces the ops that compute cos and sin of all rotary angles from the positions by one kernel.

Why: in textbook code an outer product, a concatenation, cos, sin and casts are half a dozen small kernels before the
first layer. They run once per step, so this saves only microseconds.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import fx
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_engine.kernels.launch_arguments import dependent_launch, next_power_of_2
from compiled_engine.kernels.launcher import quick_launches
from compiled_engine.passes.framework.graph_inputs import is_parameter
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import (
    always_equal,
    arg,
    aten,
    emit,
    emit_item,
    factors,
    is_call,
    only_user,
    rewrite_calls,
)
from compiled_engine.passes.framework.op_library import define_op


@quick_launches
@triton.jit(do_not_specialize=["scale"])
def rope_angles_kernel(
    positions_ptr: tl.tensor,
    inv_freq_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    scale: tl.tensor,
    NUM_PAIRS: tl.constexpr,
    LAYOUT: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
) -> None:
    """Write cos and sin of the rotary angles, position times frequency. Program (token) writes the row of one token.

    positions_ptr: [T]; inv_freq_ptr: fp32 [NUM_PAIRS], or [T, NUM_PAIRS] if PER_TOKEN; cos_ptr, sin_ptr:
    [T, 2 * NUM_PAIRS], or [T, NUM_PAIRS] with LAYOUT "once". LAYOUT, scale: see `reference`. BLOCK: NUM_PAIRS rounded
    up to a power of two.
    """
    pair = tl.arange(0, BLOCK)
    mask = pair < NUM_PAIRS
    token = tl.program_id(0).to(tl.int64)
    frequency_ptr = inv_freq_ptr + pair
    if not PER_TOKEN:  # a parameter, which no earlier kernel writes
        frequency = tl.load(frequency_ptr, mask=mask, other=0.0)
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    if PER_TOKEN:
        frequency = tl.load(frequency_ptr + token * NUM_PAIRS, mask=mask, other=0.0)
    angle = tl.load(positions_ptr + token).to(tl.float32) * frequency
    cos = (tl.cos(angle) * scale).to(cos_ptr.dtype.element_ty)
    sin = (tl.sin(angle) * scale).to(cos_ptr.dtype.element_ty)
    if LAYOUT == "once":
        row = token * NUM_PAIRS + pair
    elif LAYOUT == "halves":
        row = token * (2 * NUM_PAIRS) + pair
    else:
        row = token * (2 * NUM_PAIRS) + 2 * pair
    tl.store(cos_ptr + row, cos, mask=mask)
    tl.store(sin_ptr + row, sin, mask=mask)
    if LAYOUT != "once":
        AGAIN: tl.constexpr = NUM_PAIRS if LAYOUT == "halves" else 1
        tl.store(cos_ptr + row + AGAIN, cos, mask=mask)
        tl.store(sin_ptr + row + AGAIN, sin, mask=mask)


def reference(
    positions_T: torch.Tensor, inv_freq_p: torch.Tensor, scale: float, dtype: torch.dtype, layout: str = "halves"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scale * cos, scale * sin) of the angles, positions times the p frequencies of inv_freq_p, in `dtype`.

    inv_freq_p: fp32 [p], or [T, p] for frequencies by token.

    layout: the order of the results in the last dimension. "halves": all p angles, then all again, [T, 1, 2 p].
    "pairs": each angle twice in a row, [T, 1, 2 p]. "once": each angle once, [T, 1, p].
    """
    angles_Tp = positions_T[:, None].float() * inv_freq_p
    if layout == "halves":
        angles_Tp = torch.cat((angles_Tp, angles_Tp), dim=-1)
    elif layout == "pairs":
        angles_Tp = angles_Tp.repeat_interleave(2, dim=-1)
    angles_T1d = angles_Tp.unsqueeze(1)
    return (angles_T1d.cos() * scale).to(dtype), (angles_T1d.sin() * scale).to(dtype)


def launch(
    positions_T: torch.Tensor, inv_freq_p: torch.Tensor, scale: float, dtype: torch.dtype, layout: str = "halves"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of the rotary angles, times `scale`, computed by the kernel; see `reference`."""
    num_tokens, num_pairs = positions_T.shape[0], inv_freq_p.shape[-1]
    cos_T1d, sin_T1d = _fake(positions_T, inv_freq_p, scale, dtype, layout)
    rope_angles_kernel[(num_tokens,)](
        positions_T.contiguous(),
        inv_freq_p.contiguous(),
        cos_T1d,
        sin_T1d,
        scale,
        NUM_PAIRS=num_pairs,
        LAYOUT=layout,
        PER_TOKEN=inv_freq_p.dim() == 2,
        BLOCK=next_power_of_2(num_pairs),
        num_warps=1,
        **dependent_launch(positions_T.device),
    )
    return cos_T1d, sin_T1d


def _fake(
    positions_T: torch.Tensor, inv_freq_p: torch.Tensor, scale: float, dtype: torch.dtype, layout: str = "halves"
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (positions_T.shape[0], 1, inv_freq_p.shape[-1] * (1 if layout == "once" else 2))
    return inv_freq_p.new_empty(shape, dtype=dtype), inv_freq_p.new_empty(shape, dtype=dtype)


rope_angles = define_op(
    "rope_angles(Tensor positions_T, Tensor inv_freq_p, float scale, ScalarType dtype, "
    'str layout="halves") -> (Tensor, Tensor)',
    cpu=reference,
    cuda=launch,
    fake=_fake,
    reference=reference,
)


class RopeAngles(GraphPass):
    name = "rope_angles"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of calls of cos: one match each."""
        return len(graph.find_nodes(op="call_function", target=aten.cos.default))

    def run(self, graph: fx.Graph) -> PassResult:
        return rewrite_calls(graph, aten.cos.default, _rewrite)


def _rewrite(graph: fx.Graph, cos: fx.Node) -> list[Replacement] | str:
    angles = arg(cos, 0)
    sines = [user for user in angles.users if is_call(user, aten.sin.default)]
    if len(sines) != 1 or len(angles.users) != 2:
        return "there is no sin of the same angles"
    with_heads = is_call(angles, aten.unsqueeze.default) and angles.args[1] == 1
    of_pairs = _of_pairs(angles.args[0] if with_heads else angles)
    if isinstance(of_pairs, str):
        return of_pairs
    first, layout = of_pairs
    found = [(rows, frequencies) for column, frequencies in factors(first) if (rows := column_of(column)) is not None]
    if not found:
        return "the angles are not positions times frequencies"
    positions, inv_freq = found[0]
    if not _are_frequencies(inv_freq, positions):
        return "the frequencies are not a vector of fp32, nor one for each token"
    (cos_value, cos_scale), (sin_value, sin_scale) = _scaled(cos), _scaled(sines[0])
    if cos_scale != sin_scale or cos_value.meta["val"].dtype != sin_value.meta["val"].dtype:
        return "cos and sin are scaled or rounded differently"
    if not with_heads:
        heads = [only_user(cos_value), only_user(sin_value)]
        with_heads = all(is_call(user, aten.unsqueeze.default) and user.args[1] == 1 for user in heads)  # type: ignore[union-attr]
        if with_heads:
            cos_value, sin_value = (user for user in heads if user is not None)
    with graph.inserting_before(cos):
        # "halves" is the op's default.
        how = cos_scale, cos_value.meta["val"].dtype, *([] if layout == "halves" else [layout])
        both = emit(graph, rope_angles, positions, inv_freq, *how)
        new = [emit_item(graph, both, index) for index in range(2)]
        if not with_heads:
            new = [emit(graph, aten.squeeze.dim, value, 1) for value in new]
    cos_value.replace_all_uses_with(new[0])
    sin_value.replace_all_uses_with(new[1])
    return [Replacement(cos_value.name, new[0]), Replacement(sin_value.name, new[1])]


def _are_frequencies(value: fx.Node, positions: fx.Node) -> bool:
    """Return whether a value is a parameter, fp32 [p], or was computed as frequencies of each token, [T, p]."""
    frequencies, num_tokens = value.meta["val"], positions.meta["val"].shape[0]
    if frequencies.dtype != torch.float32:
        return False
    if is_parameter(value):
        return bool(frequencies.dim() == 1)
    return bool(frequencies.dim() == 2) and always_equal(frequencies.shape[0], num_tokens)


def _of_pairs(angles: Any) -> tuple[fx.Node, str] | str:
    """Return (the angles, each once; the layout in which `angles` has them), or why they are not recognised.

    layout: see `reference`.
    """
    if is_call(angles, aten.mul.Tensor):
        return angles, "once"
    if is_call(angles, aten.view.default, aten.reshape.default):
        repeated: Any = angles.args[0].args[0] if is_call(angles.args[0], aten.clone.default) else angles.args[0]
        column: Any = repeated.args[0] if is_call(repeated, aten.expand.default) else None
        if is_call(column, aten.unsqueeze.default) and column.args[1] in (2, -1) and repeated.meta["val"].shape[2] == 2:
            return column.args[0], "pairs"
    if not is_call(angles, aten.cat.default) or angles.args[1:] not in ((-1,), (1,)) or len(angles.args[0]) != 2:
        return "the angles are not two equal halves"
    first, second = angles.args[0]
    if first is not second or not is_call(first, aten.mul.Tensor):
        return "the two halves of the angles differ"
    return first, "halves"


def column_of(column: Any) -> fx.Node | None:
    """Return the vector [T] from which a cast and an unsqueeze, in either order, make the value [T, 1]; or None."""
    steps: list[object] = []
    while is_call(column, aten._to_copy.default, aten.unsqueeze.default) and len(steps) < 2:
        steps.append(column.target)
        if is_call(column, aten.unsqueeze.default) and column.args[1] not in (1, -1):
            return None
        column = column.args[0]
    both = {aten._to_copy.default, aten.unsqueeze.default} == set(steps)
    return column if both and column.meta["val"].dim() == 1 else None


def _scaled(value: fx.Node) -> tuple[fx.Node, float]:
    """Follow a value through a multiplication by a constant and a cast, if these are its only users.

    Returns (the last value, the constant), with constant 1 if there is no multiplication.
    """
    scale = 1.0
    user = only_user(value)
    if user is not None and is_call(user, aten.mul.Tensor) and isinstance(user.args[1], float):
        value, scale = user, user.args[1]
        user = only_user(value)
    return (user, scale) if user is not None and is_call(user, aten._to_copy.default) else (value, scale)
