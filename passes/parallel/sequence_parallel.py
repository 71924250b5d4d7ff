"""Adds sequence parallelism, for long prefills: each rank norms its own tokens instead of all tokens.

Why: an all-reduce moves as many bytes as a reduce-scatter and an all-gather. Between these two each rank has the sums
of its own tokens only, so the residual add and the norm read and write a part of the rows (Korthikanti et al., 2022,
arXiv:2205.05198). The residual stays sharded from one norm to the next: its tensor has a row for each token, but only
the rows of the rank's own tokens are valid. Such a residual may only be read by norms that are divided too. A norm is
therefore left unchanged if another op reads the sum that the norm makes with the residual.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import arg, emit_named, is_call, named, only_user
from compiled_engine.passes.norm.norms import is_sum, scaled_by_roots
from compiled_engine.passes.parallel.sequence_parallel_op import LEAST_TOKENS, sequence_parallel_norm
from compiled_engine.passes.parallel.tensor_parallel import all_reduce

_SUMMED = torch.ops.compiled_engine.all_reduce_residual_rms_norm.default
_NORM = torch.ops.compiled_engine.residual_rms_norm.default


class SequenceParallel(GraphPass):
    """Divides the residual adds and norms after all-reduces among the ranks, by tokens.

    Enabled only by the option `sequence_parallel=True`.
    """

    name = "sequence_parallel"
    requires = ("tensor_parallel", "residual_rms_norm")
    kernel_token_counts = (LEAST_TOKENS - 1,)

    def applicable(self, compile_range: CompileRange, device_type: str) -> str | None:
        if compile_range.small:
            return f"{compile_range.name} tokens are few: whole rows are exchanged at once"
        return None

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of RMSNorms whose input is a sum of two hidden states [T, D]: one match each."""
        return sum(map(is_sum, scaled_by_roots(graph)))

    def run(self, graph: fx.Graph) -> PassResult:
        graph.eliminate_dead_code()
        found = {node: parts for node in graph.nodes if (parts := _parts(node)) is not None}
        near_misses = []
        while undivided := [norm for norm in found if not _only_residuals(norm, found)]:
            for norm in undivided:
                del found[norm]
                near_misses.append(f"{norm.name}: something else reads the sum with the residual")
        replacements: list[Replacement] = []
        for norm, (x, residual) in found.items():
            with graph.inserting_before(norm):
                arguments = named(norm) | {"x_TD": x, "residual_TD": residual}
                divided = emit_named(graph, sequence_parallel_norm, arguments)
            items: list[Any] = list(norm.users)
            norm.replace_all_uses_with(divided)
            replacements += [Replacement(item.name, item) for item in items]
        graph.eliminate_dead_code()
        return PassResult(len(found), tuple(near_misses), tuple(replacements))


def _parts(norm: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return (x, residual) if the call norms the sum of the residual and the all-reduced x; otherwise None.

    x is the value before the all-reduce.
    """
    if is_call(norm, _SUMMED):
        return arg(norm, 0), arg(norm, 1)
    if not is_call(norm, _NORM):
        return None
    x, residual = arg(norm, 0), arg(norm, 1)
    if not is_call(x, all_reduce) and named(norm)["inner_weight_D"] is not None:
        return None  # x is normed first, and no all-reduce
    if not is_call(x, all_reduce):
        x, residual = residual, x
    return (arg(x, 0), residual) if is_call(x, all_reduce) and only_user(x) is norm else None


def _only_residuals(norm: fx.Node, found: dict[fx.Node, tuple[fx.Node, fx.Node]]) -> bool:
    """Return whether the sum that `norm` returns besides the norm is read only by norms in `found`, as their residual.

    found: the norms to divide among the ranks -> (x, residual), see `_parts`.
    """
    totals = [item for item in norm.users if is_call(item, operator.getitem) and item.args[1] == 1]
    readers = [(total, user) for total in totals for user in total.users]
    return all(user in found and found[user][1] is total and found[user][0] is not total for total, user in readers)
