"""Passes that convert the graph of a model from transformers' code to the form of the project's textbook models.

They run before all other passes and cannot be disabled.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx

from compiled_engine.attention.op import (
    ATTEND,
    ATTEND_PACKED,
    ATTEND_PACKED_VALUE,
    ATTEND_VALUE,
    ATTENTION,
    ATTENTION_VALUE,
    LATENT_ATTENTION,
    LATENT_ATTENTION_VALUE,
)
from compiled_engine.passes.framework.graph_inputs import is_parameter, parameter_of, source_of
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.manager import PassReport, run_passes
from compiled_engine.passes.framework.matching import (
    arg,
    aten,
    emit,
    emit_named,
    factors,
    fake_mode_of,
    is_call,
    named,
    only_user,
)
from compiled_engine.passes.framework.parameter import KEPT, Parameter, made
from compiled_engine.passes.layout.complex_numbers import ComplexNumbers, has_complex_value
from compiled_engine.passes.layout.normalise_layout import NormaliseLayout
from compiled_engine.passes.norm.norms import is_scaled_by_root
from compiled_engine.recurrence.op import VALUES
from compiled_engine.recurrence.states import CONV_STATE, MATRIX_STATE

# Arithmetic on a parameter alone moves to weight loading: Gemma's 1 + weight, a weight in another dtype, the decays of
# Mamba 2, -exp(A_log).
#
# Why: textbook norms multiply by their weight; adding one to it first only concerns how weights are stored. The result
# becomes an input of the graph, a parameter that the loader computes from the checkpoint's. A step launches no kernel
# for it.

_FUNCTIONS = {aten.exp.default: "exp", aten.neg.default: "neg"}
_STEPS = {aten.add.Tensor: "add", aten.mul.Tensor: "mul", aten._to_copy.default: "to", **_FUNCTIONS}


class FoldParameters(GraphPass):
    name = "fold_parameters"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return sum(map(_is_derivation, graph.nodes))

    def run(self, graph: fx.Graph) -> PassResult:
        replacements: list[Replacement] = []
        derived: dict[Parameter, fx.Node] = {}
        for node in list(graph.nodes):
            if not _is_derivation(node):
                continue
            parameter = arg(node, 0)
            step, value = _STEPS[node.target], node.meta["val"]  # type: ignore[index]
            result = made(parameter_of(parameter), step, _operand(node), value)
            if result not in derived:
                with graph.inserting_after(parameter):
                    derived[result] = graph.placeholder(f"derived_{node.name}")
                derived[result].meta |= {"val": value, "source": result}
            node.replace_all_uses_with(derived[result])
            graph.erase_node(node)
            replacements.append(Replacement(node.name, derived[result]))
        for placeholder in graph.find_nodes(op="placeholder"):
            if not placeholder.users and is_parameter(placeholder):
                graph.erase_node(placeholder)
        return PassResult(len(replacements), (), tuple(replacements))


def _operand(node: fx.Node) -> float | str:
    if node.target in _FUNCTIONS:
        return ""
    if len(node.args) > 1:
        return float(arg(node, 1))
    return str(node.kwargs["dtype"]).removeprefix("torch.")


def _is_derivation(node: fx.Node) -> bool:
    """Return whether the loader can compute the node: from a parameter of at most one dimension and constants alone.

    _STEPS has the possible operations. Returns False for those that a norm applies to its weight: they are matched as
    part of the norm.
    """
    last = node
    while (user := only_user(last)) is not None and is_call(user, aten.add.Tensor, aten._to_copy.default):
        last = user
    if last is not node or only_user(node) is not None:
        product = only_user(last)
        if any(factor is last and is_scaled_by_root(other) for factor, other in factors(product)):
            return False
    if not is_call(node, *_STEPS):
        return False
    parameter = arg(node, 0)
    constants = all(isinstance(other, int | float) for other in node.args[1:])
    is_vector = is_parameter(parameter) and parameter.meta["val"].dim() <= 1
    return constants and is_vector and not set(node.kwargs) - {"dtype"}


# A foreign model's attention becomes the engine's op, which writes into a given buffer.
#
# Why: traces of foreign code are functionalised, so attention is a pure function of its arguments in them
# (compiled_engine/attention/op.py). Each layer's cache is an input with no other reader. Layers that share keys and
# values get one tensor for their caches: the first of them writes to it, and the others only read.

_ATTENTIONS = (
    (ATTENTION_VALUE, ATTENTION),
    (LATENT_ATTENTION_VALUE, LATENT_ATTENTION),
    (ATTEND_VALUE, ATTEND),
    (ATTEND_PACKED_VALUE, ATTEND_PACKED),
)


class ForeignAttention(GraphPass):
    name = "foreign_attention"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of matches to expect: one per KV cache in use, and one per attention without a KV cache.

        Exactly one attention uses each KV cache.
        """
        inputs = graph.find_nodes(op="placeholder")
        caches = sum(1 for node in inputs if node.users and source_of(node).name.startswith("kv_caches."))
        return caches + len(graph.find_nodes(op="call_function", target=ATTEND_PACKED_VALUE))

    def run(self, graph: fx.Graph) -> PassResult:
        matches = 0
        for value, op in _ATTENTIONS:
            for node in graph.find_nodes(op="call_function", target=value):
                with graph.inserting_before(node):
                    like, head_dim = arg(node, 0), node.meta["val"].shape[-1]
                    if like.meta["val"].shape[-1] != head_dim:  # values of latent attention may be shorter
                        like = emit(graph, aten.slice.Tensor, like, -1, 0, head_dim)
                    out = _buffer_like(graph, like)
                    emit_named(graph, op, named(node) | {"out_THd": out})
                node.replace_all_uses_with(out)
                graph.erase_node(node)
                matches += 1
        return PassResult(matches)


# Recurrences likewise become the engine's ops, which write to their states.


class Recurrences(GraphPass):
    name = "recurrences"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of matches to expect: one per state of a recurrence in use.

        These are convolution states and matrix states. Other parameters that passes keep between steps (role KEPT),
        such as those for drafts, do not count.
        """
        inputs = [node for node in graph.find_nodes(op="placeholder") if node.users and is_parameter(node)]
        kept = [parameter.name for parameter in map(parameter_of, inputs) if parameter.role == KEPT]
        return sum(name.rpartition(".")[2] in (CONV_STATE, MATRIX_STATE) for name in kept)

    def run(self, graph: fx.Graph) -> PassResult:
        matches: Counter[str] = Counter()
        for value, (op, out_name, like) in VALUES.items():
            for node in graph.find_nodes(op="call_function", target=value):
                with graph.inserting_before(node):
                    arguments = named(node)
                    out = _buffer_like(graph, arguments[like])
                    emit_named(graph, op, arguments | {out_name: out})
                node.replace_all_uses_with(out)
                graph.erase_node(node)
                matches[op.name()] += 1
        notes = tuple(f"{count} x {name}" for name, count in matches.items())
        return PassResult(matches.total(), notes=notes)


def _buffer_like(graph: fx.Graph, given: fx.Node) -> fx.Node:
    keywords: Any = {"pin_memory": False, "memory_format": torch.contiguous_format}
    out = graph.call_function(aten.empty_like.default, (given,), keywords)
    like = given.meta["val"]
    with fake_mode_of(like):
        out.meta["val"] = torch.empty_like(like, memory_format=torch.contiguous_format)
    return out


# A power of -0.5 becomes an inverse root.
#
# Why: norms of Gemma 3n and Gemma 4 are written with the power, and all norms are recognised by their inverse root.


def _is_inverse_root(node: fx.Node) -> bool:
    return is_call(node, aten.pow.Tensor_Scalar) and bool(arg(node, 1) == -0.5)


class InverseRoots(GraphPass):
    name = "inverse_roots"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        return sum(map(_is_inverse_root, graph.nodes))

    def run(self, graph: fx.Graph) -> PassResult:
        replacements = []
        for node in [node for node in graph.nodes if _is_inverse_root(node)]:
            with graph.inserting_before(node):
                root = emit(graph, aten.rsqrt.default, arg(node, 0))
            node.replace_all_uses_with(root)
            graph.erase_node(node)
            replacements.append(Replacement(node.name, root))
        return PassResult(len(replacements), replacements=tuple(replacements))


# The ops that these passes replace exist only in traces. They cannot be executed, so these passes are never verified.
_FIRST: tuple[GraphPass, ...] = (ForeignAttention(), Recurrences())
_THEN: tuple[GraphPass, ...] = (ComplexNumbers(), InverseRoots(), NormaliseLayout(), FoldParameters())


def lower(
    graph: fx.Graph, compile_range: CompileRange, device: torch.device, *, strict: bool = False, verify: bool = False
) -> tuple[PassReport, ...]:
    """Run the passes of this module, ComplexNumbers and NormaliseLayout on a graph of transformers' code, in place.

    Returns the reports of the passes that ran; Recurrences, ComplexNumbers and InverseRoots run only if needed.
    strict, verify: see `run_passes`, whose errors this function raises too; ForeignAttention and Recurrences are never
    verified.
    """
    unneeded: set[type[GraphPass]] = set()
    if not any(node.target in VALUES for node in graph.nodes):
        unneeded.add(Recurrences)
    if not any(map(has_complex_value, graph.nodes)):
        unneeded.add(ComplexNumbers)
    if not any(map(_is_inverse_root, graph.nodes)):
        unneeded.add(InverseRoots)
    reports: tuple[PassReport, ...] = ()
    for every, verified in ((_FIRST, False), (_THEN, verify)):
        passes = [graph_pass for graph_pass in every if type(graph_pass) not in unneeded]
        names = [graph_pass.name for graph_pass in passes]
        reports += run_passes(graph, passes, names, compile_range, device, strict=strict, verify=verified)
    return reports
