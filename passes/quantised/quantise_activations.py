"""Rounds the inputs of quantised linears once for all linears that read them, if possible in the kernel before.

Why: a linear that rounds its own inputs reads 16-bit values that another kernel has just written. A norm or silu(gate)
* up has the row in registers, so only 8 bits pass between the two, with one launch less. The pass runs last, as it
absorbs other passes' ops, and only in ranges without small_batch_linear, which moves norms into the linears. In
batch-invariant engines `batch_invariance` takes its place, and rounds by the same function.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import arg, change, emit_item, emit_named, is_call, named
from compiled_engine.passes.linear.hopper_codes import TOKEN_COUNTS
from compiled_engine.passes.linear.linears import multiplied_values
from compiled_engine.passes.linear.quantised_linear_op import quantised_gated_rounded, quantised_linear
from compiled_engine.passes.linear.round_inputs import residual_rms_norm_rounded, round_inputs
from compiled_engine.passes.parallel.all_reduce_residual_rms_norm import all_reduce_residual_rms_norm_rounded
from compiled_engine.passes.quantised.quantise import scheme_of
from compiled_engine.quantisation import LinearScheme, Quantisation, Rounding

_ours = torch.ops.compiled_engine
# Norms of sums -> the op that also rounds the norm.
_SUMS = {
    _ours.residual_rms_norm.default: residual_rms_norm_rounded,
    _ours.all_reduce_residual_rms_norm.default: all_reduce_residual_rms_norm_rounded,
}


class QuantiseActivations(GraphPass):
    name = "quantise_activations"
    requires = ("quantise",)
    kernel_token_counts = TOKEN_COUNTS

    def __init__(self, quantisation: Quantisation | None = None):
        """Make the pass. quantisation: the model's quantisation rules; None for a model that is not quantised."""
        self._quantisation = quantisation

    def applicable(self, compile_range: CompileRange, device_type: str) -> str | None:
        return f"{compile_range.name} tokens is a small-batch range" if compile_range.small else None

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of values that the rules round, and that are multiplied by a quantised matrix."""
        return len(multiplied_values(graph, self._rounds))

    def run(self, graph: fx.Graph) -> PassResult:
        readers: dict[tuple[fx.Node, Rounding, fx.Node | None], list[fx.Node]] = {}
        for node in graph.find_nodes(op="call_function", target=quantised_linear):
            arguments = named(node)
            inputs = LinearScheme.parse(arguments["scheme"]).inputs
            if inputs is not None and arguments["norm_weight_K"] is None and arguments["input_scales_CT"] is None:
                readers.setdefault((arguments["x_TK"], inputs, arguments["input_scale_1"]), []).append(node)
        order = {node: place for place, node in enumerate(graph.nodes)}
        replacements: list[Replacement] = []
        notes: list[str] = []
        # In graph order, so that a linear's inputs are rounded before its result.
        for (x, rounding, static), linears in sorted(readers.items(), key=lambda item: order[item[0][0]]):
            name, dtype = x.name, str(x.meta["val"].dtype).removeprefix("torch.")
            codes, scales, by = rounded(graph, x, rounding, static, linears, replacements)
            notes.append(f"{name}: {rounding}, {by}, for {', '.join(node.name for node in linears)}")
            for node in linears:
                change(node, x_TK=codes, input_scale_1=None, input_scales_CT=scales, dtype=dtype)
                replacements.append(Replacement(node.name, node))
        graph.eliminate_dead_code()
        return PassResult(len({x for x, *_ in readers}), (), tuple(replacements), tuple(notes))

    def _rounds(self, parameter: fx.Node) -> bool:
        scheme = None if self._quantisation is None else scheme_of(self._quantisation, parameter)
        return scheme is not None and scheme.inputs is not None


def rounded(
    graph: fx.Graph,
    x: fx.Node,
    rounding: Rounding,
    static: fx.Node | None,
    linears: list[fx.Node],
    replacements: list[Replacement],
) -> tuple[fx.Node, fx.Node, str]:
    """Emit ops that round the value `x`, which `linears` read. Return (codes, scales, text that says in which kernel).

    static: the node of a static scale; None: the scales follow from the values. If x is the norm of a residual sum, one
    op computes the sum and the codes; the replacement of the sum is then appended to `replacements`.
    """
    how: dict[str, Any] = {"static_1": static, "rounding": str(rounding)}
    by = "alone"
    with graph.inserting_after(x):
        op, arguments = round_inputs, {"x_TK": x} | how
        if not set(x.users) <= set(linears):
            by = "alone, since others read the value"
        elif is_call(x, operator.getitem) and arg(x, 1) == 0 and is_call(arg(x, 0), *_SUMS):
            codes, scales = _in_sum(graph, arg(x, 0), how, replacements)
            return codes, scales, "in the norm of a sum"
        elif is_call(x, _ours.rms_norm.default):
            norm = named(x)
            arguments |= {"x_TK": norm["x_TD"], "norm_weight_K": norm["weight_D"], "eps": norm["eps"]}
            arguments |= {"norm_offset": norm["offset"], "norm_wide": norm["wide"]}
            by = "in the norm"
        elif is_call(x, _ours.silu_mul.default):
            arguments |= {"x_TK": arg(x, 0), "activation": named(x)["activation"]}
            by = "in silu * up"
        elif is_call(x, quantised_linear) and named(x)["silu_mul"] and named(x)["input_scales_CT"] is not None:
            op, arguments = quantised_gated_rounded, named(x) | how
            by = "by the linear of gate and up"
        both = emit_named(graph, op, arguments)
    codes, scales = _items(graph, both, 2)
    return codes, scales, by


def _in_sum(
    graph: fx.Graph, norm: fx.Node, how: dict[str, Any], replacements: list[Replacement]
) -> tuple[fx.Node, fx.Node]:
    """Replace the op that norms a residual sum by one that also rounds the norm; return the codes and the scales.

    how: arguments of the new op, by name. The replacement of the sum is appended to `replacements`.
    """
    with graph.inserting_before(norm):
        fused = emit_named(graph, _SUMS[norm.target], named(norm) | how)  # type: ignore[index]
    codes, scales, total = _items(graph, fused, 3)
    for item in list(norm.users):
        if is_call(item, operator.getitem) and arg(item, 1) == 1:
            item.replace_all_uses_with(total)
            replacements.append(Replacement(item.name, total))
    return codes, scales


def _items(graph: fx.Graph, sequence: fx.Node, count: int) -> list[fx.Node]:
    items = []
    for index in reversed(range(count)):
        with graph.inserting_after(sequence):
            items.append(emit_item(graph, sequence, index))
    return items[::-1]
