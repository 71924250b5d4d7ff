"""Cuts the graph of a decoder where values depend on the encoder's result alone: at k and v of each cross-attention.

A trace of transformers' decoder computes k and v from the encoder's result in every step. They are the same in all
steps of a request, and for all requests with the same clip. So the graph becomes two compiled functions.
One computes the keys and values of a clip, once. The other, which runs in every step, reads them from parameters in
which each clip has a slot.
"""

from __future__ import annotations

import torch
from torch import fx

from compiled_engine.passes.framework.graph_inputs import add_parameter, argument, is_parameter, source_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult
from compiled_engine.passes.framework.matching import named
from compiled_engine.passes.framework.parameter import KEPT, Parameter
from compiled_engine.passes.framework.random_inputs import RandomInputs
from compiled_engine.passes.framework.verifier import VerificationError, copy_of, difference, run_whole
from compiled_engine.passes.speech.cross_attention import cross_attention

# The decoder's argument with the encoder's result: the only argument of the callable that computes keys and values. The
# other callable does not have it.
ENCODED = "encoded_ED"
KINDS = ("keys", "values")


def cross_parameters(layer: int, num_rows: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> list[Parameter]:
    """Return the parameters that hold keys and values of a layer's cross-attention, [num_rows, H, d] each."""
    shape, name = (num_rows, num_heads, head_dim), str(dtype).removeprefix("torch.")
    return [Parameter(f"cross_{kind}.{layer}", shape, name, KEPT) for kind in KINDS]


class HoistEncoder(GraphPass):
    """Cuts a decoder's graph at the keys and values of cross-attention, and keeps one of the two parts.

    hoists: keep the part that computes keys and values; it returns the keys and values of all layers, in order.
    Otherwise keep the other part, which reads `num_rows` rows of keys and values of each layer.
    """

    name = "hoist_encoder"
    required = True  # without it, a step has no encoder's result

    def __init__(self, num_rows: int, *, hoists: bool) -> None:
        self._num_rows, self._hoists = num_rows, hoists
        self._whole: fx.Graph | None = None  # the graph before the cut

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of matches to expect: two per cross-attention, for its keys and for its values."""
        return 2 * len(graph.find_nodes(op="call_function", target=cross_attention))

    def run(self, graph: fx.Graph) -> PassResult:
        self._whole = copy_of(graph)
        encoded, border = argument(graph, ENCODED), _border(graph)
        missed = tuple(
            f"{node.name}, computed from the encoder's result alone, is read by {user.name}"
            for node, user in _crossings(graph, encoded)
            if node not in border
        )
        if missed:
            return PassResult(0, missed)
        if self._hoists:
            graph.output_node().args = (tuple(border),)
            _keep_ancestors(graph)
        else:
            self._read_kept(graph)
            graph.eliminate_dead_code()
        for placeholder in graph.find_nodes(op="placeholder"):
            if not placeholder.users and (is_parameter(placeholder) or self._is_left(placeholder)):
                graph.erase_node(placeholder)
        return PassResult(len(border))

    def verify(
        self, graph: fx.Graph, result: PassResult, compile_range: CompileRange, device: torch.device
    ) -> int | None:
        """Compare the keys and values that `graph` computes with those of the graph before the cut, for few tokens.

        Returns the number of values compared: 0 for the other part, which only reads keys and values from parameters.
        Raises VerificationError for a value that differs.
        """
        if not self._hoists or self._whole is None:
            return 0
        inputs = RandomInputs(self._whole, compile_range.low, device, 1.0)
        expected, found = run_whole(self._whole, inputs)[0], run_whole(graph, inputs)[0]
        results = graph.output_node().args[0]
        for old, new in zip(_border(self._whole), results, strict=True):  # type: ignore[arg-type]
            if (problem := difference(expected[old], expected[old], found[new])) is not None:
                raise VerificationError(f"pass {self.name}: {new.name} {problem}")
        return result.matches

    def _read_kept(self, graph: fx.Graph) -> None:
        for layer, call in enumerate(graph.find_nodes(op="call_function", target=cross_attention)):
            given = named(call)
            keys: fx.Node = given["k_EHd"]
            fake: torch.Tensor = keys.meta["val"]
            _, num_heads, head_dim = fake.shape
            described = cross_parameters(layer, self._num_rows, int(num_heads), int(head_dim), fake.dtype)
            for value, parameter in zip((keys, given["v_EHd"]), described, strict=True):
                call.replace_input_with(value, add_parameter(graph, parameter))

    def _is_left(self, placeholder: fx.Node) -> bool:
        """Return whether the part that is kept may lose this argument if no node reads it.

        The part that computes keys and values loses the step's arguments, the other part the encoder's result.
        """
        return (source_of(placeholder).name == ENCODED) != self._hoists


def _border(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes at which the graph is cut: the keys, then the values of each cross-attention, layer by layer."""
    calls = graph.find_nodes(op="call_function", target=cross_attention)
    return [named(call)[name] for call in calls for name in ("k_EHd", "v_EHd")]


def _keep_ancestors(graph: fx.Graph) -> None:
    """Erase all calls that the graph's results do not depend on, even those of ops that write to their arguments."""
    needed = {graph.output_node()}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
        elif node.op != "placeholder":
            graph.erase_node(node)


def _crossings(graph: fx.Graph, encoded: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Return (value, reader) for each value that depends on `encoded` alone, and whose reader depends on more.

    Parameters, and values computed from parameters alone, do not count.
    """
    fixed, alone = set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        if node is encoded or (node.op == "placeholder" and source_of(node).name == ENCODED):  # or a size of it
            alone.add(node)
        elif is_parameter(node):
            fixed.add(node)
        elif node.op == "call_function" and alone.union(fixed).issuperset(node.all_input_nodes):
            (fixed if fixed.issuperset(node.all_input_nodes) else alone).add(node)
    return [(node, user) for node in graph.nodes if node in alone for user in node.users if user not in alone]
