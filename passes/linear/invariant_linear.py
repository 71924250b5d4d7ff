"""Replaces each linear by an op whose result for a token does not depend on the tokens beside it, bit for bit.

The pass runs only in batch-invariant engines: as the last pass, and on all of the model's functions, including those
that other engines leave as eager code. If an op is left whose sums could depend on the batch, the pass raises
ValueError and names the op.

Why: libraries choose a kernel, and with it the order of a sum, by the number of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compiled_engine.kernels.cpp_library import CannotCompile
from compiled_engine.passes.framework.graph_inputs import parameter_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import emit, is_call, named, only_user
from compiled_engine.passes.framework.op_library import LinearArguments, define_op
from compiled_engine.passes.linear import invariant_quantised, silu_mul, small_batch_linear_cpu
from compiled_engine.passes.linear.invariant_product import MOST_SPREAD, TOKEN_BUCKETS, invariant_product
from compiled_engine.passes.linear.linears import Linear, linear_of, multiplied_values

# Ops of the engine that reduce nothing, or each row in an order that follows from its length alone.
_OWN_OPS = frozenset(
    f"compiled_engine::{name}"
    for name in (
        *("invariant_linear", "invariant_quantised_linear", "rms_norm", "residual_rms_norm", "rope_angles"),
        *("rope_kv_write", "attend", "rope_attend", "attention"),
    )
)
# Ops of torch that move or convert elements.
_MOVES = frozenset(
    f"aten::{name}"
    for name in (
        *("embedding", "index_select", "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "unsqueeze"),
        *("squeeze", "slice", "select", "split", "split_with_sizes", "expand", "clone", "cat", "_to_copy", "copy"),
        *("empty", "empty_like", "new_empty", "full", "arange", "alias", "detach", "sym_size"),
    )
)
# Elementwise ops whose result IEEE 754 fixes, so that vectors and single elements give the same bits on a CPU.
_EXACT = frozenset(
    f"aten::{name}" for name in ("add", "sub", "mul", "div", "neg", "abs", "where", "sqrt", "minimum", "maximum", "lt")
)
# The token counts at which invariant_product changes its tile, or the programs of its parts. None changes a sum.
_TOKEN_COUNTS = (*TOKEN_BUCKETS, MOST_SPREAD)
_TOKENS_PER_CALL = small_batch_linear_cpu.MOST_TOKENS


def reference(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """Return linear(x), [T, N]; with an activation, activation(gate) * up of its two halves, [T, N / 2]."""
    y_TN = torch.nn.functional.linear(x_TK, weight_NK, bias_N)
    return y_TN if activation is None else silu_mul.reference(y_TN, activation)


def _on_cpu(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    if not len(x_TK):
        return reference(x_TK, weight_NK, bias_N, activation)
    parts = []
    for part_TK in x_TK.split(_TOKENS_PER_CALL):
        part = small_batch_linear_cpu.kernel_launch(part_TK, weight_NK, bias_N, None, 0.0, None, activation, 0.0)
        if part is None:
            raise CannotCompile("batch_invariant needs the C++ kernel of linears, which does not serve these operands")
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def launch(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    """Return linear(x), or activation(gate) * up of its halves, by the kernel of invariant_product; see `reference`."""
    y_TN = invariant_product(x_TK, weight_NK, bias_N)
    return y_TN if activation is None else silu_mul.launch(y_TN, activation)


def _fake(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    return x_TK.new_empty((x_TK.shape[0], weight_NK.shape[0] // (1 if activation is None else 2)))


invariant_linear = define_op(
    "invariant_linear(Tensor x_TK, Tensor weight_NK, Tensor? bias_N=None, str? activation=None) -> Tensor",
    cpu=_on_cpu,
    cuda=launch,
    fake=_fake,
    linear=LinearArguments("x_TK", "weight_NK", "bias_N", alone=(("activation", None),)),
)


class InvariantLinear(GraphPass):
    name = "invariant_linear"
    required = True
    kernel_token_counts = _TOKEN_COUNTS

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of values that are multiplied by a weight matrix.

        merge_linears leaves one linear, and so one match, per value.
        """
        return len(multiplied_values(graph))

    def run(self, graph: fx.Graph) -> PassResult:
        replacements = []
        for node in list(graph.nodes):
            linear = linear_of(node)
            if linear is None or not linear.is_known:
                continue
            user = only_user(node)
            activation = None
            result = node
            if user is not None and is_call(user, torch.ops.compiled_engine.silu_mul.default):
                result, activation = user, named(user)["activation"]
            _require_kernel(linear, activation)
            with graph.inserting_before(result):
                fused = _emitted(graph, linear, activation)
            result.replace_all_uses_with(fused)
            replacements.append(Replacement(result.name, fused))
        graph.eliminate_dead_code()
        for node in graph.nodes:
            _require_invariant(node)
        return PassResult(len(replacements), (), tuple(replacements))


def _emitted(graph: fx.Graph, linear: Linear, activation: str | None) -> fx.Node:
    """Emit the op for a linear at the graph's insertion point, and return its node."""
    operands = linear.x, linear.weight
    if linear.quantised is None:
        return emit(graph, invariant_linear, *operands, linear.bias, activation)
    scales, scheme = linear.quantised.scales, str(linear.quantised.scheme)
    more = scales, linear.quantised.input_scale, linear.bias, scheme, activation
    return emit(graph, invariant_quantised.invariant_quantised_linear, *operands, *more)


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


def _require_invariant(node: fx.Node) -> None:
    """Raise ValueError if a call's result for a token may depend on other tokens or on their number."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return
    name = target.name().partition(".")[0]
    if name in _OWN_OPS or name in _MOVES or name in _EXACT:
        return
    value = node.meta.get("val")
    # On a GPU each element of an elementwise op is computed in the same way, wherever it is. On a CPU the library has
    # other instructions for the last elements than for whole vectors.
    is_elementwise = torch.Tag.pointwise in target.tags or name == "compiled_engine::silu_mul"
    if is_elementwise and isinstance(value, torch.Tensor) and value.device.type == "cuda":
        return
    raise ValueError(
        f"batch_invariant is True, but the model computes {node.name} by {target}, whose bits may depend on the other "
        "tokens of a step; allowed: models of which passes make linears, RMSNorms, rotary attention and gated MLPs"
    )
