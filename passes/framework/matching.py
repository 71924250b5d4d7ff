"""Helpers to match patterns in FX graphs and to insert calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from compiled_engine.attention.op import ATTEND, ATTENTION, LATENT_ATTENTION
from compiled_engine.passes.framework.graph_pass import PassResult, Replacement

aten = torch.ops.aten
# Activations of gates.
ACTIVATIONS = (aten.silu.default, aten.gelu.default)


def attention_calls(graph: fx.Graph) -> list[fx.Node]:
    """Return the calls of attention over the KV cache: first those that write to it, then those that only read it."""
    ops = ATTENTION, LATENT_ATTENTION, ATTEND
    return [node for op in ops for node in graph.find_nodes(op="call_function", target=op)]


def rewrite_calls(
    graph: fx.Graph,
    target: Callable[..., Any],
    rewrite: Callable[[fx.Graph, fx.Node], Sequence[Replacement] | str | None],
) -> PassResult:
    """Pass each node that calls `target` to `rewrite`, then erase unused nodes. Return the pass's result.

    If the pattern around the node matches, `rewrite` inserts the fused op and returns the replacements. If the node
    looks like the pattern but does not match, `rewrite` returns the reason. For an unrelated node, it returns None.
    """
    matches, near_misses = 0, []
    replacements: list[Replacement] = []
    for node in graph.find_nodes(op="call_function", target=target):
        found = rewrite(graph, node)
        if isinstance(found, str):
            near_misses.append(f"{node.name}: {found}")
        elif found is not None:
            matches += 1
            replacements += found
    graph.eliminate_dead_code()
    return PassResult(matches, tuple(near_misses), tuple(replacements))


def arg(node: fx.Node, index: int) -> Any:
    """Return a call's positional argument, typed as Any because FX's union type is too wide to work with."""
    return node.args[index]


def named(call: fx.Node) -> dict[str, Any]:
    """Return a call's arguments by their schema names, defaults included."""
    op: Any = call.target
    names = [argument.name for argument in op._schema.arguments]
    return _defaults(op) | dict(zip(names, call.args, strict=False)) | call.kwargs


def change(call: fx.Node, **arguments: Any) -> None:
    """Replace arguments of a call in place. arguments: new values by schema name; the others keep theirs."""
    call.args, call.kwargs = _in_order(call.target, named(call) | arguments), {}


def _defaults(op: Any) -> dict[str, Any]:
    return {each.name: each.default_value for each in op._schema.arguments if each.has_default_value()}


def _in_order(op: Any, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments in the order of the op's schema. Raises KeyError if an argument of the schema is missing."""
    return tuple(arguments[each.name] for each in op._schema.arguments)


def fake_mode_of(value: Any) -> FakeTensorMode:
    """Return the fake mode of the first fake tensor in a value or nested sequence, which must contain one."""
    return next(leaf.fake_mode for leaf in tree_leaves(value) if isinstance(leaf, FakeTensor))


def is_call(node: object, *targets: Callable[..., Any]) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def through_cast(node: Any) -> Any:
    """Return the input of a `_to_copy` that changes the dtype alone; any other node is returned itself.

    Matchers use it to skip conversions, since bf16 graphs have conversions that fp32 graphs lack.
    """
    return node.args[0] if is_call(node, aten._to_copy.default) and set(node.kwargs) == {"dtype"} else node


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def user_through_cast(node: fx.Node) -> fx.Node | None:
    """Return the only user of a value. If this user is a conversion (`_to_copy`), return the conversion's only user.

    Returns None if the value or the conversion has no user, or more than one.
    """
    user = only_user(node)
    if user is not None and is_call(user, aten._to_copy.default):
        return only_user(user)
    return user


def other_factor(product: fx.Node, factor: object) -> Any:
    """Return the operand of a multiplication that is not `factor`. `factor` may be cast before it is multiplied."""
    left, right = arg(product, 0), arg(product, 1)
    return right if through_cast(left) is factor or left is factor else left


def factors(product: Any) -> list[tuple[fx.Node, fx.Node]]:
    """Return the operands of a multiplication in both orders, [(left, right), (right, left)].

    Returns [] if the node is no multiplication of two nodes.
    """
    if not is_call(product, aten.mul.Tensor) or not all(isinstance(a, fx.Node) for a in product.args):
        return []
    left, right = product.args
    return [(left, right), (right, left)]


def emit(graph: fx.Graph, target: Callable[..., Any], *args: Any) -> fx.Node:
    """Insert a call of `target` at the graph's insertion point, compute its fake value, and return the new node."""
    node = graph.call_function(target, args)
    values = fx.map_arg(args, lambda argument: argument.meta["val"])
    with fake_mode_of(values):
        node.meta["val"] = target(*values)
    return node


def emit_named(graph: fx.Graph, op: Callable[..., Any], arguments: Mapping[str, Any]) -> fx.Node:
    """Insert a call of `op` as `emit` does, and return it.

    arguments: the call's arguments by schema name; a missing argument takes the schema's default.
    Names that are not in the op's schema are ignored, so the arguments of another op's call can be passed.
    """
    return emit(graph, op, *_in_order(op, _defaults(op) | dict(arguments)))


def emit_item(graph: fx.Graph, sequence: fx.Node, index: int) -> fx.Node:
    node = graph.call_function(operator.getitem, (sequence, index))
    node.meta["val"] = sequence.meta["val"][index]
    return node


def always_equal(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Return whether two sizes, which may be symbolic, are known to be equal for all values of their symbols."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy: a quarter of a second

    return statically_known_true(a == b)
