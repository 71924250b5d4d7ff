"""Executes what a pass rewrote, before and after, on random inputs, and compares both with an fp32 oracle.

The graph before the pass is run once, as a whole, on random inputs. Each replacement is then a small region: from the
value that was replaced back to values which both sides have, and both start from the numbers recorded there. A value
that stayed but is computed from something else than before, which the pass did not report, is checked too. This is
done twice, with ordinary weights and with tiny ones (where an eps begins to count). The oracle is the region before
the pass in fp32, with casts to narrower dtypes left out: the rewrite may be as far from it as the original is, and a
little more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from compiled_engine.passes.framework.graph_inputs import parameter_of, source_of
from compiled_engine.passes.framework.graph_pass import CompileRange, PassResult
from compiled_engine.passes.framework.matching import aten, is_call
from compiled_engine.passes.framework.parameter import compute
from compiled_engine.passes.framework.random_inputs import RandomInputs

# Largest error of the rewrite relative to the original's, and tolerance in units in the last place of a row's largest
# value, for sums in another order.
FACTOR = 2.0
ULPS = {torch.float32: 64.0, torch.bfloat16: 4.0, torch.float16: 4.0}
# All results of a row of fewer may cancel out, so it is forgiven what the mean row is.
NARROW = 8
# The most tokens that are run; a larger range is checked at its low end and here.
MOST_TOKENS = 128
SCALES = (1.0, 1e-3)

# Calls with uninitialised results: the tensor that they are modelled on may change.
ALLOCATIONS = (aten.empty_like.default, aten.empty.memory_format)

Values = dict[fx.Node, Any]


@dataclass(frozen=True)
class _Run:
    """The graph before the pass, executed once."""

    inputs: RandomInputs
    values: Values
    snapshots: dict[tuple[fx.Node, fx.Node], torch.Tensor]


class VerificationError(RuntimeError):
    """A rewrite computes something else than what it replaced."""


def copy_of(graph: fx.Graph) -> fx.Graph:
    """The graph as it is now, with the same names; what `verify_rewrites` compares with."""
    copy = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = copy.node_copy(node, lambda argument: copies[argument])
        copies[node].name = node.name
    return copy


@torch.no_grad()
def verify_rewrites(
    name: str, before: fx.Graph, after: fx.Graph, result: PassResult, compile_range: CompileRange, device: torch.device
) -> int:
    """Check every replacement of pass `name`, and what it changed unreported, at both ends of the range.

    Returns how many were checked.

    Raises VerificationError naming the value, the number of tokens and how far off it is.
    """
    old_by_name = {node.name: node for node in before.nodes}
    present = set(after.nodes)
    replaced = {r.after: old_by_name[r.before] for r in result.replacements if r.after in present}
    named = [(new, old_by_name[new.name]) for new in present if new.name in old_by_name]
    stayed = {new: old for new, old in named if new.target == old.target}
    same = replaced | stayed  # what took another value's place, and stayed itself, has its own value
    replaced |= _unreported(before, after, stayed | replaced)
    _check_inputs_and_writes(name, before, after, same, replaced)
    for num_tokens in sorted({compile_range.low, min(compile_range.high, MOST_TOKENS)}):
        for scale in SCALES:
            inputs = RandomInputs(before, num_tokens, device, scale)
            run = _Run(inputs, *run_whole(before, inputs))
            for new, old in replaced.items():
                _verify(f"pass {name}, {num_tokens} tokens", old, new, same, run)
    return len(replaced)


def _unreported(before: fx.Graph, after: fx.Graph, same: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Values that must have stayed the same although the pass did not say so: after -> before.

    They are the calls that stayed with other arguments, and what the graph returns.
    """
    kept = {new: old for new, old in same.items() if new.op == "call_function" and new.name == old.name}
    changed = {
        new: old
        for new, old in kept.items()
        if not is_call(new, *ALLOCATIONS) and _arguments(new, same) != (old.args, old.kwargs)
    }
    returned = zip(after.output_node().all_input_nodes, before.output_node().all_input_nodes, strict=True)
    return changed | {new: old for new, old in returned if same.get(new) is not old}


def _arguments(node: fx.Node, same: dict[fx.Node, fx.Node]) -> Any:
    """A call's arguments as the corresponding nodes of the graph before."""
    return fx.map_arg((node.args, node.kwargs), lambda argument: same.get(argument, argument))


def _check_inputs_and_writes(
    name: str, before: fx.Graph, after: fx.Graph, same: dict[fx.Node, fx.Node], replaced: dict[fx.Node, fx.Node]
) -> None:
    """Check what no comparison of values shows: inputs with another source, removed or added writes."""
    for new, old in same.items():
        if new.op == "placeholder" and old.op == "placeholder" and source_of(new) != source_of(old):
            raise VerificationError(f"pass {name}: input {new.name} has another source than before")
    stayed = set(same.values()).union(*(_region(old, set(same.values()) - {old})[1] for old in replaced.values()))
    compared = set(same).union(*(_region(new, set(same) - {new})[1] for new in replaced))
    for graph, known, what in ((before, stayed, "went"), (after, compared, "came")):
        for node in graph.nodes:
            if node.op == "call_function" and mutated(node) and node not in known:
                raise VerificationError(f"pass {name}: {node.name}, which writes to its inputs, {what} unreported")


def run_whole(graph: fx.Graph, inputs: RandomInputs) -> tuple[Values, dict[tuple[fx.Node, fx.Node], torch.Tensor]]:
    """Every value of the graph; and for each (tensor, op that mutates it) what the tensor was before."""
    values: Values = {}
    snapshots = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = inputs.of(node)
        elif node.op == "call_function":
            for argument in mutated(node).values():
                snapshots[argument, node] = values[argument].clone()
            values[node] = run_call(node, values)
    return values, snapshots


def _verify(where: str, old: fx.Node, new: fx.Node, same: dict[fx.Node, fx.Node], run: _Run) -> None:
    old_leaves, old_inner = _region(old, set(same.values()) - {old})
    new_leaves, new_inner = _region(new, set(same) - {new})

    def value(leaf: fx.Node | None, packed: fx.Node) -> Any:
        if leaf is None:
            return compute(parameter_of(packed), run.inputs.parameter)
        written = (run.snapshots[leaf, call] for call in old_inner if (leaf, call) in run.snapshots)
        recorded = next(written, run.values[leaf])
        return recorded.clone() if isinstance(recorded, torch.Tensor) else recorded

    expected = _execute(old_inner, {leaf: value(leaf, leaf) for leaf in old_leaves})
    oracle = _execute(old_inner, {leaf: _widened(value(leaf, leaf)) for leaf in old_leaves}, wide=True)
    # A parameter that the pass has derived from another is computed, not taken from what it replaced.
    derivation = new.op == "placeholder" and same[new].op != "placeholder"
    found = _execute(
        new_inner, {leaf: value(None if derivation and leaf is new else same.get(leaf), leaf) for leaf in new_leaves}
    )
    for what, old_node, new_node in _results(old, old_inner, new, new_inner):
        problem = difference(expected[old_node], oracle[old_node], found[new_node])
        if problem is not None:
            raise VerificationError(f"{where}: {what} of {new.name}, which replaced {old.name}, {problem}")


def _region(node: fx.Node, known: set[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """(known values and graph inputs, calls in order) that the node is computed from and with. With a tensor that the
    region allocates come the calls that write to it."""
    leaves: set[fx.Node] = set()
    inner: set[fx.Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current in leaves or current in inner:
            continue
        if current is not node and (current in known or current.op == "placeholder"):
            leaves.add(current)
        else:
            inner.add(current)
            pending += current.all_input_nodes
            if is_call(current, *ALLOCATIONS):
                pending += [user for user in current.users if current in mutated(user).values()]
    if node.op == "placeholder":  # it took the place of a no-op
        return [node], []
    return list(leaves), [candidate for candidate in node.graph.nodes if candidate in inner]


def _execute(calls: Iterable[fx.Node], leaves: Values, wide: bool = False) -> Values:
    values = dict(leaves)
    for node in calls:
        narrows = is_call(node, aten._to_copy.default) and node.kwargs.get("dtype") in (torch.bfloat16, torch.float16)
        values[node] = values[node.args[0]] if wide and narrows else run_call(node, values)  # type: ignore[index]
    return values


def run_call(node: fx.Node, values: Values) -> Any:
    """Make the call on these values of its arguments."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: values[argument])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def mutated(node: fx.Node) -> dict[str, fx.Node]:
    """The tensors that a call writes to, by the op's name for them."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return {}
    arguments = node.target._schema.arguments
    return {
        declared.name: given
        for declared, given in zip(arguments, node.args, strict=False)
        if declared.alias_info is not None and declared.alias_info.is_write and isinstance(given, fx.Node)
    }


def _results(
    old: fx.Node, old_inner: list[fx.Node], new: fx.Node, new_inner: list[fx.Node]
) -> list[tuple[str, fx.Node, fx.Node]]:
    """The tensors to compare: the values, unless calls have none, and the tensors that the regions wrote to and did not
    allocate."""
    written, rewritten = (
        {name: node for call in inner for name, node in mutated(call).items() if node not in inner}
        for inner in (old_inner, new_inner)
    )
    if set(written) != set(rewritten):
        raise VerificationError(f"{new.name} writes to {sorted(rewritten)}, {old.name} wrote to {sorted(written)}")
    values = [] if mutated(old) else [("the value", old, new)]
    return [*values, *((n, written[n], rewritten[n]) for n in sorted(written))]


def _widened(value: Any) -> Any:
    """Return values in fp32. Codes of 8 bits stay: kernels multiply them as they are."""
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in ULPS else value


def difference(expected: torch.Tensor, oracle: torch.Tensor, found: torch.Tensor) -> str | None:
    """Return None if `found` is about as near to the oracle as `expected`, row by row; otherwise the difference."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"is {found.dtype}{list(found.shape)} instead of {expected.dtype}{list(expected.shape)}"
    if not expected.is_floating_point() or not expected.numel():
        return None if torch.equal(expected, found) else "has other elements"
    rows = [t.float().reshape(-1, t.shape[-1]) for t in (expected, oracle, found)]
    error_before, error_after = ((row - rows[1]).abs().amax(-1) for row in (rows[0], rows[2]))
    ulps = ULPS[expected.dtype] * torch.finfo(expected.dtype).eps
    largest = rows[1].abs().amax(-1)
    if expected.shape[-1] < NARROW:
        largest = torch.maximum(largest, largest.mean())
    allowed = FACTOR * error_before + ulps * largest
    bad = ~(error_after <= allowed)  # also where it is NaN
    if not bad.any():
        return None
    row = int(bad.nonzero()[0])
    return f"is off by {error_after[row]:.3g} in row {row}, the original by {error_before[row]:.3g}"
