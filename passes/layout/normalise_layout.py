"""Converts graphs of transformers' code to the layout of textbook models: no batch dimension, tokens before heads.

Why: transformers computes hidden states [1, T, D] and attends over [1, H, T, d]; the other passes and the kernels use
[T, D] and [T, H, d]. The pass describes each value as a view of another tensor, its core, which has no batch dimension
(layout_form.py). Ops are rewritten to compute cores, so that views and transpositions disappear. An op that the pass
does not know gets its inputs in their original layout: the result is correct, but other passes do not recognise the op.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from compiled_engine.passes.framework.graph_inputs import is_parameter
from compiled_engine.passes.framework.graph_pass import CompileRange, GraphPass, PassResult, Replacement
from compiled_engine.passes.framework.matching import always_equal, arg, aten, emit, emit_item, fake_mode_of, is_call
from compiled_engine.passes.layout.layout_form import Form, Size, permuted, reshaped, squeezed, unsqueezed
from compiled_engine.passes.layout.layout_ops import LayoutOps

_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_COPIES = (aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)


class NormaliseLayout(GraphPass):
    name = "normalise_layout"

    def contract(self, graph: fx.Graph, compile_range: CompileRange) -> int:
        """Return the number of calls whose result has a leading dimension of size one, the batch: one match each."""
        return sum(_has_batch(node) for node in graph.nodes if node.op == "call_function")

    def run(self, graph: fx.Graph) -> PassResult:
        return _Normalisation(graph).run()


class _Normalisation:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.forms: dict[fx.Node, Form] = {}
        self.views: dict[tuple[Any, ...], fx.Node] = {}
        self.ops = LayoutOps(graph, self.form, self.ordered, self._view)

    def run(self) -> PassResult:
        nodes = [node for node in self.graph.nodes if node.op in ("call_function", "output")]
        self.last_input = self.graph.find_nodes(op="placeholder")[-1]
        unknown: Counter[str] = Counter()
        replacements = []
        for node in nodes:
            with self.graph.inserting_before(node):
                form = self._follow(node)
            if form is None:
                if node.op != "output" and any(not self.form(value).is_core for value in node.all_input_nodes):
                    unknown[str(node.target)] += 1
                with self.graph.inserting_before(node):
                    node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), self._whole)
                continue
            self.forms[node] = form
            if form.is_core and form.core is not node and isinstance(node.meta["val"], torch.Tensor):
                replacements.append(Replacement(node.name, form.core))
        followed = sum(1 for node in self.forms if _has_batch(node))
        self.graph.eliminate_dead_code()
        misses = tuple(f"{count} x {target}: gets values as they were" for target, count in unknown.items())
        return PassResult(followed, misses, tuple(replacements))

    def form(self, value: fx.Node) -> Form:
        return self.forms.get(value) or Form.of(value)

    def ordered(self, form: Form) -> Form:
        """Return an equal form whose core has its dimensions in the value's order; emit a permutation if needed."""
        if form.is_ordered:
            return form
        core = self._view(aten.permute.default, form.core, list(form.order))
        places = iter(range(len(form.order)))
        return Form(core, tuple(None if dim is None else next(places) for dim in form.dims))

    def _view(self, target: Any, core: fx.Node, *arguments: Any) -> fx.Node:
        """Return a view of a core: a call of `target`, emitted right after the core unless an equal one exists.

        Views of a parameter are emitted where the first op reads them: among the ops of the parameter's layer, which
        `repeat_layers` copies.
        """
        key = (target, core, str(arguments))
        if key not in self.views:
            if is_parameter(core):
                self.views[key] = emit(self.graph, target, core, *arguments)
            else:
                with self.graph.inserting_after(self.last_input if core.op == "placeholder" else core):
                    self.views[key] = emit(self.graph, target, core, *arguments)
        return self.views[key]

    def _whole(self, value: fx.Node) -> fx.Node:
        """Return a node that has the value in its original layout. It may be a new view of the value's core."""
        if value not in self.forms:
            return value
        form = self.ordered(self.forms[value])
        core = form.core
        for place, dim in enumerate(form.dims):
            if dim is None:
                core = self._view(aten.unsqueeze.default, core, place)
        return core

    def _follow(self, node: fx.Node) -> Form | None:
        """Return the form of the node's value, its description as a view of a core (see layout_form.py).

        Unless the node is a view, emits the op that computes the core. Returns None for an op that cannot be applied to
        cores; it must read its inputs in their original layout.
        """
        target, args = node.target, node.args
        if node.op == "output" or not args or not _are_tensors(node):
            return None
        if target is operator.getitem:
            return self._item(node)
        if not isinstance(args[0], fx.Node):
            return self.ops.follow(node)
        first = self.form(args[0])
        if target is aten.unsqueeze.default:
            return unsqueezed(first, args[1])  # type: ignore[arg-type]
        if is_call(node, aten.squeeze.dim, aten.select.int):
            return squeezed(first, args[1]) or self.ops.follow(node)  # type: ignore[arg-type]
        if is_call(node, aten.transpose.int):
            order = list(range(first.rank))
            a, b = arg(node, 1) % first.rank, arg(node, 2) % first.rank
            order[a], order[b] = b, a
            return permuted(first, order)
        if is_call(node, aten.permute.default):
            return permuted(first, [dim % first.rank for dim in arg(node, 1)])
        if is_call(node, *_COPIES):
            return first
        if is_call(node, aten.expand.default):
            return self._expanded(node, first)
        if is_call(node, *_RESHAPES):
            return self._reshaped(node, first)
        return self.ops.follow(node)

    def _expanded(self, node: fx.Node, form: Form) -> Form | None:
        """Emit an `expand` on the core, and return the form of the result. Expanded dimensions are added to the core.

        Returns None if the expansion adds dimensions, expands a dimension of the core, or has a symbolic size.
        """
        wanted = node.meta["val"].shape
        if len(wanted) != form.rank:
            return None
        longer = [i for i, size in enumerate(wanted) if not always_equal(size, form.sizes()[i])]
        if not longer:
            return form
        if any(form.dims[i] is not None or not isinstance(wanted[i], int) for i in longer):
            return None
        form = self.ordered(form)
        core, dims = form.core, list(form.dims)
        for i in longer:
            place = len([dim for dim in dims[:i] if dim is not None])
            core = emit(self.graph, aten.unsqueeze.default, core, place)
            dims = [None if dim is None else dim + (dim >= place) for dim in dims]
            dims[i] = place
        sizes = [-1] * len(core.meta["val"].shape)
        for i in longer:
            sizes[dims[i]] = wanted[i]  # type: ignore[index]
        return Form(emit(self.graph, aten.expand.default, core, sizes), tuple(dims))

    def _item(self, node: fx.Node) -> Form | None:
        several, index = node.args
        form = self.forms.get(several)  # type: ignore[arg-type]
        return Form(emit_item(self.graph, form.core, index), form.dims) if form else None  # type: ignore[arg-type]

    def _reshaped(self, node: fx.Node, form: Form) -> Form | None:
        wanted = node.meta["val"].shape
        found = reshaped(form, wanted)
        if found is None:
            form = self.ordered(form)
            found = reshaped(form, wanted)
        if found is None:
            return None
        sizes, dims = found
        if sizes is None:
            return Form(form.core, dims)
        # A symbolic size is given as a value of the graph, or as -1 if it is the only one.
        given = {str(size): argument for size, argument in zip(wanted, node.args[1], strict=True)}  # type: ignore[arg-type]
        arguments = [size if isinstance(size, int) else given.get(str(size)) for size in sizes]
        if None in arguments or arguments.count(-1) > 1:
            return None
        target = aten.view.default if _is_a_view(form.core.meta["val"], sizes) else aten.reshape.default
        return Form(emit(self.graph, target, form.core, arguments), dims)


def _is_a_view(fake: torch.Tensor, sizes: Sequence[Size]) -> bool:
    """Return whether the tensor can be reshaped to these sizes without a copy."""
    try:
        with fake_mode_of(fake):
            fake.view(sizes)  # type: ignore[arg-type]
    except (RuntimeError, ValueError):
        return False
    return True


def _are_tensors(node: fx.Node) -> bool:
    """Return whether the node's result is a tensor, or a list or tuple of tensors."""
    made = node.meta.get("val")
    return isinstance(made, torch.Tensor) or (
        isinstance(made, list | tuple) and all(isinstance(item, torch.Tensor) for item in made)
    )


def _has_batch(node: fx.Node) -> bool:
    """Return whether the node's value is a tensor of at least two dimensions whose first has size one."""
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor) and value.dim() > 1 and isinstance(value.shape[0], int) and value.shape[0] == 1
    )
