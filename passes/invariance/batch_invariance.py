"""Makes a model batch-invariant: what it computes for a token does not depend on other tokens, bit for bit.

The pass runs only in batch-invariant engines: as the last pass, and on all of the model's functions, including those
that other engines leave as eager code. It replaces each op whose sums could depend on the batch by one that adds in one
order. If such an op is left, the pass raises ValueError and names the op. Recurrences are changed before all passes.

Why: libraries choose a kernel, and with it the order of a sum, by the number of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compiled_engine.passes.experts import experts_tiles
from compiled_engine.passes.experts.experts_gate import Gate
from compiled_engine.passes.experts.experts_op import experts
from compiled_engine.passes.experts.invariant_experts import why_not as why_no_experts
from compiled_engine.passes.framework.graph_inputs import parameter_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import change, emit, is_call, named, only_user
from compiled_engine.passes.invariance import row_functions
from compiled_engine.passes.invariance.bit_check import RECURRENCES, check_bits
from compiled_engine.passes.invariance.row_moves import mixes_tokens
from compiled_engine.passes.linear import (
    invariant_hopper,
    invariant_product,
    invariant_quantised,
    small_batch_linear_cpu,
)
from compiled_engine.passes.linear.invariant_linear import invariant_linear
from compiled_engine.passes.linear.linears import Linear, Quantised, linear_of, multiplied_values
from compiled_engine.passes.parallel.tensor_parallel import all_reduce, all_reduce_in_order
from compiled_engine.passes.quantised.quantise_activations import rounded
from compiled_engine.quantisation import Rounding

# Ops of the engine that reduce nothing, or each row in an order that follows from its length alone.
_OWN_OPS = frozenset(
    f"compiled_engine::{name}"
    for name in (
        *("invariant_linear", "invariant_quantised_linear", "rms_norm", "residual_rms_norm", "rope_angles"),
        *("rope_kv_write", "attend", "rope_attend", "attention", "element_function", "row_function"),
        *("all_reduce_in_order", "vocabulary_part", "top_k", "round_inputs", "residual_rms_norm_rounded"),
    )
)
# Ops of torch that move, convert or choose elements. They keep tokens apart: see mixes_tokens.
_MOVES = frozenset(
    f"aten::{name}"
    for name in (
        *("embedding", "index_select", "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "unsqueeze"),
        *("squeeze", "slice", "select", "split", "split_with_sizes", "expand", "clone", "cat", "_to_copy", "copy"),
        *("empty", "empty_like", "new_empty", "full", "arange", "alias", "detach", "sym_size"),
        *("topk", "gather", "scatter", "scatter_", "masked_fill", "zeros_like", "new_zeros", "bitwise_not"),
    )
)
# Elementwise ops whose result IEEE 754 fixes, so that vectors and single elements give the same bits on a CPU.
_EXACT = frozenset(
    f"aten::{name}"
    for name in (
        *("add", "sub", "mul", "div", "neg", "abs", "where", "sqrt", "reciprocal", "relu"),
        *("minimum", "maximum", "clamp", "clamp_min", "lt", "le", "gt", "ge", "eq", "ne"),
    )
)
# The token counts at which linears of values and experts change their tiles, or a product the programs of its parts,
# and those at which linears of codes do. They select every tile. None changes a sum.
_OF_VALUES = frozenset(
    {
        invariant_product.MOST_SPREAD,
        *experts_tiles.TOKEN_COUNTS,
        *invariant_product.TOKEN_BUCKETS,
        *invariant_hopper.TOKEN_COUNTS,
    }
)
_OF_CODES = frozenset(invariant_quantised.COUNTS)
# Ops whose bits are compared when a model is compiled. Recurrences are compared too.
_COMPARED = (
    invariant_linear,
    invariant_quantised.invariant_quantised_linear,
    experts,
    row_functions.element_function,
    row_functions.row_function,
    torch.ops.compiled_engine.rms_norm.default,
    torch.ops.compiled_engine.residual_rms_norm.default,
)
# Numbers of rows that are compared on a CPU, whose kernels take up to small_batch_linear_cpu.MOST_TOKENS at once.
_FEW_COUNTS = (1, 2, 3, small_batch_linear_cpu.MOST_TOKENS, small_batch_linear_cpu.MOST_TOKENS + 1)


class BatchInvariance(GraphPass):
    name = "batch_invariance"
    required = True
    kernel_token_counts = tuple(sorted(_OF_VALUES | _OF_CODES))

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of values that are multiplied by a weight matrix.

        merge_linears leaves one linear, and so one match, per value.
        """
        return len(multiplied_values(graph))

    def run(self, graph: fx.Graph) -> PassResult:
        replacements: list[Replacement] = []
        num_linears = 0
        for node in list(graph.nodes):
            linear = linear_of(node)
            if linear is not None and linear.is_known:
                _replace_linear(graph, linear, replacements)
                num_linears += 1
            elif is_call(node, experts):
                _require_experts(node)
                change(node, invariant=True)
            elif is_call(node, all_reduce):
                with graph.inserting_before(node):
                    total = emit(graph, all_reduce_in_order, *node.args)
                node.replace_all_uses_with(total)
                replacements.append(Replacement(node.name, total))
            elif (new := row_functions.replaced(graph, node)) is not None:
                replacements.append(Replacement(node.name, new))
        graph.eliminate_dead_code()
        for node in graph.nodes:
            _require_invariant(node)
        return PassResult(num_linears, (), tuple(replacements), check_bits(graph, _COMPARED, _counts(graph)))


def prepare_invariant(graph: fx.Graph) -> None:
    """Let recurrences process tokens one by one. This is done before all passes, so it is no rewrite to be verified.

    In chunks, sums round so differently that the verifier would report them.
    """
    for node in graph.nodes:
        if is_call(node, *RECURRENCES):
            change(node, invariant=True)


def _counts(graph: fx.Graph) -> tuple[int, ...]:
    """Return the numbers of rows in which bits are compared: around those at which kernels change."""
    values = (node.meta["val"] for node in graph.find_nodes(op="placeholder"))
    on_gpu = any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in values)
    has_codes = any(is_call(node, invariant_quantised.invariant_quantised_linear) for node in graph.nodes)
    around = {count + more for count in (_OF_VALUES | _OF_CODES if has_codes else _OF_VALUES) for more in (0, 1)}
    return tuple(sorted({*_FEW_COUNTS, *around})) if on_gpu else _FEW_COUNTS


def _replace_linear(graph: fx.Graph, linear: Linear, replacements: list[Replacement]) -> None:
    """Replace a linear, with the gate after it if there is one; append what is replaced to `replacements`."""
    result = linear.node
    user = only_user(result)
    activation = None
    if user is not None and is_call(user, torch.ops.compiled_engine.silu_mul.default):
        result, activation = user, named(user)["activation"]
    _require_kernel(linear, activation)
    if linear.quantised is None:
        with graph.inserting_before(result):
            new = emit(graph, invariant_linear, linear.x, linear.weight, linear.bias, activation)
    else:
        new = _emit_quantised(graph, linear, linear.quantised, result, activation, replacements)
    result.replace_all_uses_with(new)
    replacements.append(Replacement(result.name, new))


def _emit_quantised(
    graph: fx.Graph,
    linear: Linear,
    quantised: Quantised,
    result: fx.Node,
    activation: str | None,
    replacements: list[Replacement],
) -> fx.Node:
    """Emit the op for a quantised linear before `result`, and what rounds its inputs, if possible in a norm."""
    scheme, dtype = quantised.scheme, linear.x.meta["val"].dtype
    assert scheme.inputs is not None  # see _require_kernel
    codes, scales, _ = rounded(graph, linear.x, scheme.inputs, quantised.input_scale, [linear.node], replacements)
    operands = codes, scales, linear.weight, quantised.scales, linear.bias
    with graph.inserting_before(result):
        name = str(dtype).removeprefix("torch.")
        return emit(graph, invariant_quantised.invariant_quantised_linear, *operands, str(scheme), name, activation)


def _require_kernel(linear: Linear, activation: str | None) -> None:
    """Raise ValueError if no kernel with a fixed order of sums supports the linear."""
    value = linear.weight.meta["val"]
    if linear.quantised is not None:
        num_columns = linear.x.meta["val"].shape[1]
        if reason := invariant_quantised.why_not(linear.quantised, num_columns, value.device):
            raise ValueError(
                f"batch_invariant is True, but {parameter_of(linear.weight).name} is quantised, and {reason}; "
                "allowed: on CUDA codes of e4m3 or int8 with rounded inputs, or weights that are not quantised"
            )
        return
    if value.device.type != "cpu":
        return
    (num_rows, num_columns), lanes = value.shape, small_batch_linear_cpu.LANES
    fits = num_columns % lanes == 0 and (activation is None or num_rows % (2 * lanes) == 0)
    if not fits or activation not in (None, *small_batch_linear_cpu.ACTIVATIONS) or value.dtype != torch.float32:
        raise ValueError(
            f"batch_invariant is True, but the C++ kernel of linears does not serve a weight {list(value.shape)} of "
            f"{value.dtype} with activation {activation}; allowed: float32, columns in multiples of {lanes}, with an "
            f"activation rows in multiples of {2 * lanes}, and {', '.join(small_batch_linear_cpu.ACTIVATIONS)}"
        )


def _require_experts(call: fx.Node) -> None:
    """Raise ValueError if no kernel with a fixed order of sums supports the experts."""
    arguments = named(call)
    gate_up, down = (arguments[name].meta["val"] for name in ("gate_up_END", "down_EDI"))
    schemes = [arguments[f"{name}_scheme"] for name in ("gate_up", "down")]
    gate = Gate(*(arguments[name] for name in ("activation", "alpha", "limit", "interleaved")))
    packed = any(Rounding.parse(scheme).format.per_byte > 1 for scheme in schemes if scheme)
    reason = why_no_experts(gate_up, down, gate, gate_up.device.type, packed=packed, coded=any(schemes))
    if reason is not None:
        raise ValueError(
            f"batch_invariant is True, but the model has experts, and {reason}; allowed: experts in the model's "
            "dtype, or on CUDA in codes of 8 bits"
        )


def _require_invariant(node: fx.Node) -> None:
    """Raise ValueError if a call's result for a token may depend on other tokens or on their number."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return
    if (how := mixes_tokens(node)) is not None:
        raise ValueError(
            f"batch_invariant is True, but the model computes {node.name} by {target} {how}, so that a token's "
            "values depend on the other tokens of a step; allowed: models that compute each token by itself, but for "
            "attention and recurrences"
        )
    name = target.name().partition(".")[0]
    if name in _OWN_OPS or name in _EXACT or (name in _MOVES and "reduce" not in target._overloadname):
        return
    if "invariant" in {argument.name for argument in target._schema.arguments} and named(node)["invariant"]:
        return
    value = node.meta.get("val")
    # On a GPU each element of an elementwise op is computed in the same way, wherever it is. On a CPU the library has
    # other instructions for the last elements than for whole vectors.
    is_elementwise = torch.Tag.pointwise in target.tags or name == "compiled_engine::silu_mul"
    if is_elementwise and isinstance(value, torch.Tensor) and value.device.type == "cuda":
        return
    raise ValueError(
        f"batch_invariant is True, but the model computes {node.name} by {target}, whose bits may depend on the other "
        "tokens of a step; allowed: models of which passes make linears, RMSNorms, rotary attention, experts, "
        "recurrences and gated MLPs"
    )
