"""Verifies a pass: runs each rewritten region and its original on random inputs, and compares both with an fp32 oracle.

The graph before the pass runs once as a whole, and its values are recorded. Each replacement defines a region: the
calls from the replaced value back to values that both graphs have. The region runs in both graphs, on the recorded
values. A call that the pass did not report, but whose arguments changed, is checked too. The oracle is the original
region in fp32, without casts to narrower dtypes; the rewrite's error may be about as large as the original's. All this
is done twice: with ordinary weights, and with tiny ones, for which a norm's eps matters.
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
from compiled_engine.passes.framework.parameter import KV_SCALES, compute
from compiled_engine.passes.framework.random_inputs import RandomInputs

# Allowed error of the rewrite relative to the original's, and, for another order of summation, in units in the last
# place of a row's largest value. In fp32 the original is the oracle too, without an error of its own. Rounding errors
# grow in attention whose scores have no factor (Gemma 4).
FACTOR = 2.0
ULPS = {torch.float32: 128.0, torch.bfloat16: 4.0, torch.float16: 4.0}
# In narrower rows all results may cancel out, so they are measured against the mean row.
NARROW = 8
# Larger ranges are checked at their low end and at this token count.
MOST_TOKENS = 128
SCALES = (1.0, 1e-3)

# Calls with uninitialised results: the argument that gives their shape may differ.
ALLOCATIONS = (aten.empty_like.default, aten.empty.memory_format)

Values = dict[fx.Node, Any]


@dataclass(frozen=True)
class _Run:
    """The values recorded while the graph before the pass ran once, on random inputs."""

    inputs: RandomInputs
    values: Values
    snapshots: dict[tuple[fx.Node, fx.Node], torch.Tensor]  # (tensor, op that mutates it) -> the tensor before


class VerificationError(RuntimeError):
    """Raised if a rewrite computes a different result than the code it replaced."""


def copy_of(graph: fx.Graph) -> fx.Graph:
    """Return a copy of the graph whose nodes keep their names. `verify_rewrites` matches nodes by name."""
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
    """Check all replacements and unreported changes of the pass `name`, and return how many values were compared.

    before, after: the graph before and after the pass; `before` comes from `copy_of`. Values are compared with the
    fewest tokens of the range, and with the most tokens but at most MOST_TOKENS. Raises VerificationError, which names
    the first differing value, the number of tokens and the error.
    """
    old_by_name = {node.name: node for node in before.nodes}
    present = set(after.nodes)
    replaced = {r.after: old_by_name[r.before] for r in result.replacements if r.after in present}
    named = [(new, old_by_name[new.name]) for new in present if new.name in old_by_name]
    stayed = {new: old for new, old in named if new.target == old.target}
    same = replaced | stayed  # a node that stayed and also replaced another has its own value
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
    """Return pairs of nodes, after the pass -> before it, that the pass did not report but that must be equal.

    These are calls whose arguments changed, and graph outputs that are other nodes now. same: nodes of the rewritten
    graph -> nodes of the original graph with the same value.
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
    """Return (args, kwargs) of a call, with each node replaced by its counterpart in `same`, if it has one."""
    return fx.map_arg((node.args, node.kwargs), lambda argument: same.get(argument, argument))


def _check_inputs_and_writes(
    name: str, before: fx.Graph, after: fx.Graph, same: dict[fx.Node, fx.Node], replaced: dict[fx.Node, fx.Node]
) -> None:
    """Raise VerificationError for a change that comparing values would miss.

    These are an input whose source has changed, and a call that writes to its arguments and was added or removed
    outside the compared regions.
    """
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
    """Run the graph. Returns the value of each node, and copies of mutated tensors from before the mutation.

    The keys of the copies are (node of the tensor, node of the call that mutates it).
    """
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
    # An allocation that stayed has its recorded value: the calls that write to it have stayed, too.
    is_known = is_call(new, *ALLOCATIONS) and same.get(new, old) is not old
    new_leaves, new_inner = ([new], []) if is_known else _region(new, set(same) - {new})

    def value(leaf: fx.Node | None, packed: fx.Node) -> Any:
        if leaf is None:
            parameter = parameter_of(packed)
            computed = compute(parameter, run.inputs.parameter)
            # Scales that a pass adds change nothing if they are 1, as without a checkpoint's.
            return torch.ones_like(computed) if parameter.role == KV_SCALES else computed
        written = (run.snapshots[leaf, call] for call in old_inner if (leaf, call) in run.snapshots)
        recorded = next(written, run.values[leaf])
        return recorded.clone() if isinstance(recorded, torch.Tensor) else recorded

    expected = _execute(old_inner, {leaf: value(leaf, leaf) for leaf in old_leaves})
    oracle = _execute(old_inner, {leaf: _widened(value(leaf, leaf)) for leaf in old_leaves}, wide=True)
    # A parameter that the pass derived from another is computed, not taken from the value it replaced.
    derivation = new.op == "placeholder" and same[new].op != "placeholder"
    found = _execute(
        new_inner, {leaf: value(None if derivation and leaf is new else same.get(leaf), leaf) for leaf in new_leaves}
    )
    for what, old_node, new_node in _results(old, old_inner, new, new_inner):
        problem = difference(expected[old_node], oracle[old_node], found[new_node])
        if problem is not None:
            raise VerificationError(f"{where}: {what} of {new.name}, which replaced {old.name}, {problem}")


def _region(node: fx.Node, known: set[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the calls that compute a node from known values: (known values that they read, calls in graph order).

    The known values are the nodes in `known`, whose values are recorded, and placeholders. The calls include those that
    write to tensors allocated by these calls.
    """
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
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: values[argument])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def mutated(node: fx.Node) -> dict[str, fx.Node]:
    """Return the argument nodes that a call writes to, by the arguments' names in the op's schema."""
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
    """Return (description, old node, new node) for each pair of tensors to compare.

    old, new: the replaced node and the node that replaces it. old_inner, new_inner: the calls that compute them, the
    regions. One pair is the two nodes, unless the old node is a call that writes to its arguments. The others are
    tensors from outside that both regions write to. Raises VerificationError if the regions write to different
    arguments.
    """
    written, rewritten = (
        {name: node for call in inner for name, node in mutated(call).items() if node not in inner}
        for inner in (old_inner, new_inner)
    )
    if set(written) != set(rewritten):
        raise VerificationError(f"{new.name} writes to {sorted(rewritten)}, {old.name} wrote to {sorted(written)}")
    values = [] if mutated(old) else [("the value", old, new)]
    return [*values, *((n, written[n], rewritten[n]) for n in sorted(written))]


def _widened(value: Any) -> Any:
    """Convert a floating-point tensor (fp32, bf16, fp16) to fp32; return any other value unchanged.

    8-bit codes stay unchanged too, since ops multiply them in their own dtype.
    """
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in ULPS else value


def difference(expected: torch.Tensor, oracle: torch.Tensor, found: torch.Tensor) -> str | None:
    """Return None if `found` is about as close to the oracle as `expected`, row by row; otherwise the problem, as text.

    expected, oracle: results of the original region in its own dtypes and in fp32. found: the rewrite's result. Shapes
    and dtypes of `expected` and `found` must be equal. Elements that are infinite, 8-bit codes or not floating-point
    must be equal.
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"is {found.dtype}{list(found.shape)} instead of {expected.dtype}{list(expected.shape)}"
    if expected.dtype not in ULPS or not expected.numel():
        codes = expected.is_floating_point() and expected.itemsize == 1
        before, after = (each.view(torch.uint8) if codes else each for each in (expected, found))
        return None if torch.equal(before, after) else "has other elements"
    width = expected.shape[-1] if expected.dim() else 1
    rows = [t.float().reshape(-1, width) for t in (expected, oracle, found)]
    alike = rows[0].isinf() & (rows[0] == rows[1]) & (rows[0] == rows[2])  # such as scores of experts that are left out
    rows = [row.masked_fill(alike, 0.0) for row in rows]
    error_before, error_after = ((row - rows[1]).abs().amax(-1) for row in (rows[0], rows[2]))
    ulps = ULPS[expected.dtype] * torch.finfo(expected.dtype).eps
    largest = rows[1].abs().amax(-1)
    if width < NARROW:
        largest = torch.maximum(largest, largest.mean())
    allowed = FACTOR * error_before + ulps * largest
    bad = ~(error_after <= allowed)  # also where it is NaN
    if not bad.any():
        return None
    row = int(bad.nonzero()[0])
    return f"is off by {error_after[row]:.3g} in row {row}, the original by {error_before[row]:.3g}"
