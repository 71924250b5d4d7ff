"""Recognises linears in graphs: `linear_of` is the only matcher of x @ weight^T + bias for all passes.

Which ops are linears is declared in op_library.py, so every pass recognises quantised linears too. A pass that supports
only some weight formats must check `Linear.format`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from compiled_engine.passes.framework.graph_inputs import is_parameter, parameter_of
from compiled_engine.passes.framework.matching import arg, aten, emit, emit_named, is_call, named
from compiled_engine.passes.framework.op_library import PLAIN, QUANTISED, QUANTISED_PARAMETERS, declaration_of
from compiled_engine.passes.framework.parameter import Parameter
from compiled_engine.passes.linear.experts_codes import experts_weight
from compiled_engine.quantisation import LinearScheme

_TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)


@dataclass(frozen=True)
class Quantised:
    """The scheme of a quantised weight, and its parameters besides the codes.

    columns: if the checkpoint stores columns in another order (GPTQ's act-order), the column of the input for each
    column of the codes; otherwise None.
    """

    scales: fx.Node
    zeros: fx.Node | None
    input_scale: fx.Node | None
    scheme: LinearScheme
    columns: fx.Node | None = None

    @property
    def parameters(self) -> dict[str, fx.Node]:
        """The parameters that are not None, by the names of quantised_linear's arguments."""
        found = {"scales_RC": self.scales, "zeros_RC": self.zeros, "input_scale_1": self.input_scale}
        found["columns_1K"] = self.columns
        return {name: node for name, node in found.items() if node is not None}

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of quantised_linear that describe the weight: its parameters, and the scheme as text."""
        return {**self.parameters, "scheme": str(self.scheme)}


@dataclass(frozen=True)
class Linear:
    """A call in a graph that computes x @ weight^T + bias, with its operands."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node  # parameter [N, K], stored in `format`
    bias: fx.Node | None  # parameter [N], or None
    format: str
    operand: fx.Node  # the weight as the call's argument, maybe transposed
    quantised: Quantised | None = None  # None for a weight that is not quantised

    @property
    def is_known(self) -> bool:
        """Whether the engine has kernels for the weight's format: plain or quantised."""
        return self.format == PLAIN or self.quantised is not None

    @property
    def parameters(self) -> list[fx.Node]:
        """The nodes of the weight, of its scales and other parameters, and of the bias if there is one."""
        beside = self.quantised.parameters.values() if self.quantised else ()
        return [self.weight, *beside, *([] if self.bias is None else [self.bias])]


def linear_of(node: object) -> Linear | None:
    """Return the linear that a call computes; None for any node that is not recognised as a linear."""
    found = _match(node)
    return found if isinstance(found, Linear) else None


def why_no_linear(node: object) -> str | None:
    """Return why a call of an op that is declared as a linear is not recognised; None for linears and other nodes."""
    found = _match(node)
    return found if isinstance(found, str) else None


def _match(node: object) -> Linear | str | None:
    if not isinstance(node, fx.Node) or (declared := declaration_of(node.target).linear) is None:
        return None
    arguments = named(node)
    operand, bias = arguments[declared.weight], arguments[declared.bias] if declared.bias else None
    weight: Any = _transposed(operand) if declared.transposed else operand
    if not is_parameter(weight):
        return "the matrix is not a transposed parameter"
    for name, value in declared.alone:
        if arguments[name] != value:
            return f"it does more than a linear: {name} is {arguments[name]}"
    if bias is not None and not (is_parameter(bias) and bias.meta["val"].dim() == 1):
        return "what is added is not a bias vector"
    quantised = None
    if declared.format == QUANTISED:
        scales, zeros, input_scale, columns = (arguments[name] for name in QUANTISED_PARAMETERS)
        quantised = Quantised(scales, zeros, input_scale, LinearScheme.parse(arguments["scheme"]), columns)
    return Linear(node, arguments[declared.x], weight, bias, declared.format, operand, quantised)


def _transposed(matrix: object) -> fx.Node | None:
    """Return the operand if the node transposes its last two dimensions; otherwise None."""
    rank = matrix.meta["val"].dim() if isinstance(matrix, fx.Node) and is_call(matrix, *_TRANSPOSES) else 0
    if not isinstance(matrix, fx.Node) or rank < 2:
        return None
    *leading, before, last = range(rank)
    if is_call(matrix, aten.transpose.int):
        swaps = {arg(matrix, 1) % rank, arg(matrix, 2) % rank} == {before, last}
    else:
        swaps = is_call(matrix, aten.t.default) or [d % rank for d in arg(matrix, 1)] == [*leading, last, before]
    return arg(matrix, 0) if swaps else None


def emit_linear(
    graph: fx.Graph, x: fx.Node, weight: fx.Node, bias: fx.Node | None, quantised: Quantised | None = None
) -> fx.Node:
    """Emit a linear at the graph's insertion point, and return its node.

    quantised: if `weight` holds the codes of a quantised weight, the weight's other parameters; otherwise None.
    """
    if quantised is not None:
        arguments = {"x_TK": x, "codes_NK": weight, "bias_N": bias, "zeros_RC": None, "input_scale_1": None}
        return emit_named(graph, torch.ops.compiled_engine.quantised_linear.default, arguments | quantised.arguments)
    transposed = emit(graph, aten.t.default, weight)
    if bias is None:
        return emit(graph, aten.mm.default, x, transposed)
    return emit(graph, aten.addmm.default, bias, x, transposed)


@dataclass(frozen=True)
class ExpertsLinear:
    """A batched matrix product (bmm) that computes x @ weight^T + bias for each of E experts."""

    x: fx.Node
    weight: fx.Node  # parameter [E, N, K], or [E, K, N] if transposed, or a call of experts_weight, [E, N, K]
    transposed: bool
    bias: fx.Node | None  # parameter [E, N], or None
    operand: fx.Node  # the weight as the batched product's argument


def experts_linear_of(value: Any) -> ExpertsLinear | None:
    """Return the linear of experts that computes `value`, or None if none does.

    Such a linear is a batched matrix product (bmm) with a parameter or decoded codes, or the bmm plus a bias.
    """
    bias = None
    if is_call(value, aten.add.Tensor) and len(value.args) == 2 and not value.kwargs:
        for product, row in (value.args, value.args[::-1]):
            if is_call(row, aten.unsqueeze.default) and row.args[1] == 1 and is_parameter(row.args[0]):
                value, bias = product, row.args[0]
                break
    if not is_call(value, aten.bmm.default):
        return None
    x, matrix = value.args
    if is_parameter(matrix):
        return ExpertsLinear(x, matrix, True, bias, matrix)
    weight = _transposed(matrix)
    is_weight = is_parameter(weight) or is_call(weight, experts_weight)
    return ExpertsLinear(x, weight, False, bias, matrix) if weight is not None and is_weight else None


def is_by_columns(node: fx.Node) -> bool:
    """Return whether a parameter of experts has the shape [E, K, N], so that products take it without a transpose."""
    return any(is_call(user, aten.bmm.default) for user in node.users)


def by_rows(node: fx.Node) -> Parameter:
    """Return the description of a parameter of experts, with its shape in the stored order of dimensions: [E, N, K]."""
    weight = parameter_of(node)
    if not is_by_columns(node):
        return weight
    shard = weight.shard
    if shard is not None:
        dim = {None: None, 0: 0, 1: 2, 2: 1}[shard.dim]
        shard = replace(shard, whole=_swapped(shard.whole), dim=dim, outputs_last=False)
    return replace(weight, shape=_swapped(weight.shape), shard=shard)


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[0], shape[2], shape[1]


def product_of(node: fx.Node) -> Linear | ExpertsLinear | None:
    """Return the linear, or the experts' linear without its bias, that a call computes; otherwise None.

    An experts' linear is only returned if its weight is a parameter.
    """
    if not is_call(node, aten.bmm.default):
        return linear_of(node)
    found = experts_linear_of(node)
    return found if found is not None and is_parameter(found.weight) else None


def multiplied_values(graph: fx.Graph, counts: Callable[[fx.Node], bool] = is_parameter) -> Counter[fx.Node]:
    """Return, for each value [T, K], the number of weight matrices [N, K] that it is multiplied by, for contracts.

    counts: a function that returns whether a parameter is counted. Every op that reads both such a matrix and a value
    counts as a multiplication, even if `linear_of` does not recognise it. A matrix [K, N], as in GPT-2, is not counted:
    ops that take weight^T read it without a transpose.
    """
    readers: dict[fx.Node, fx.Node] = {}
    for parameter in filter(counts, graph.find_nodes(op="placeholder")):
        if parameter.meta["val"].dim() != 2:
            continue
        transposes = [user for user in parameter.users if _transposed(user) is parameter]
        direct = [user for user in parameter.users if user not in transposes and not _takes_transpose(user)]
        for reader in (*direct, *(user for matrix in transposes for user in matrix.users)):
            values = [node for node in reader.all_input_nodes if _is_of_tokens(node)]
            if values:
                readers[reader] = values[0]
    return Counter(readers.values())


def _takes_transpose(call: fx.Node) -> bool:
    linear = declaration_of(call.target).linear
    return linear is not None and linear.transposed


def _is_of_tokens(node: fx.Node) -> bool:
    """Return whether the node is a value [T, K] rather than a matrix of parameters."""
    value = node.meta.get("val")
    is_matrix = isinstance(value, torch.Tensor) and value.dim() == 2 and value.is_floating_point()
    return is_matrix and not is_parameter(node) and not is_parameter(_transposed(node))
