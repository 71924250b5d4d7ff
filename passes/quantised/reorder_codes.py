"""Stores four-bit codes in the order that Hopper's kernel reads, and their scales and zero points transposed.

Why: a thread of the kernel then finds its tensor core operands in the words that it reads, and a step's scales are
neighbours in memory. The loader reorders them on the device, once. The pass runs last, since other passes merge linears
by stacking rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from compiled_engine.passes.framework.graph_inputs import parameter_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import change, fake_mode_of, named
from compiled_engine.passes.framework.parameter import STEPS, WEIGHT, made
from compiled_engine.passes.linear.hopper_integers import why_not_in_words
from compiled_engine.passes.linear.quantised_linear_op import quantised_linear
from compiled_engine.passes.linear.round_inputs import capability_of
from compiled_engine.quantisation import LinearScheme

HOPPER = 9


class ReorderCodes(GraphPass):
    name = "reorder_codes"
    requires = ("quantise",)

    def applicable(self, compile_range: CompileRange, device_type: str) -> str | None:
        return None if device_type == "cuda" else "only a kernel of Hopper reads another order"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return 0: which linears can be reordered is known only after merging. The result's notes name the others."""
        return 0

    def run(self, graph: fx.Graph) -> PassResult:
        replacements, notes = [], []
        for node in graph.find_nodes(op="call_function", target=quantised_linear):
            name = parameter_of(named(node)["codes_NK"]).name
            reason = _obstacle(node)
            if reason is None:
                reorder(graph, node)
                replacements.append(Replacement(node.name, node))
            else:
                notes.append(f"{name}: {reason}")
        return PassResult(len(replacements), (), tuple(replacements), tuple(notes))


def _obstacle(node: fx.Node) -> str | None:
    """Return why a linear's codes stay in the order of their columns; None if they are reordered."""
    arguments, device = named(node), node.meta["val"].device
    if device.type == "cuda" and capability_of(device)[0] != HOPPER:
        return "the GPU is no Hopper"
    scheme = LinearScheme.parse(arguments["scheme"])
    num_rows, stored = arguments["codes_NK"].meta["val"].shape
    k = stored * scheme.weight.format.per_byte
    return why_not_in_words(num_rows, k, scheme, node.meta["val"].dtype)


def reorder(graph: fx.Graph, node: fx.Node) -> None:
    """Change a quantised linear so that it reads reordered codes, scales and zero points."""
    arguments = named(node)
    operands = {
        "codes_NK": _made(graph, arguments["codes_NK"], "words", "int32"),
        "scales_RC": _made(graph, arguments["scales_RC"], "transposed", "float32"),
    }
    if arguments["zeros_RC"] is not None:
        operands["zeros_RC"] = _made(graph, arguments["zeros_RC"], "transposed", "int16")
    change(node, **operands)
    for before in (arguments["codes_NK"], arguments["scales_RC"], arguments["zeros_RC"]):
        if before is not None and not before.users:
            graph.erase_node(before)


def _made(graph: fx.Graph, operand: fx.Node, step: str, dtype: str) -> fx.Node:
    """Add an input to the graph, which the loader computes from `operand` by `step`, and return the input.

    step: a key of parameter.STEPS. dtype: the new input's dtype.
    """
    value = operand.meta["val"]
    # On "meta": even with fake tensors, indexing a GPU's tensor needs a build of PyTorch for that GPU.
    like = STEPS[step](torch.empty(value.shape, dtype=value.dtype, device="meta"), dtype)
    with fake_mode_of(value):
        result = torch.empty(like.shape, dtype=like.dtype, device=value.device)
    parameter = replace(made(parameter_of(operand), step, dtype, result), role=WEIGHT, scheme="")
    with graph.inserting_after(operand):
        node = graph.placeholder(f"{step}_{operand.name}")
    node.meta |= {"val": result, "source": parameter}
    return node
