"""Rewrites ops other than views to compute on the cores of their inputs; layout_form explains cores and forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from compiled_engine.passes.framework.matching import arg, aten, fake_mode_of, is_call
from compiled_engine.passes.layout.layout_form import Form

# Op -> position of its dimension argument.
_BY_DIMENSION = {
    aten.slice.Tensor: 1,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.mean.dim: 1,
    aten.sum.dim_IntList: 1,
    aten.amax.default: 1,
    aten._softmax.default: 1,
    aten.cumsum.default: 1,
}


class LayoutOps:
    """Emits ops on the cores of their inputs, and returns the forms of their results.

    A form describes a value as a view of its core, see layout_form.py. The arguments are functions. form: returns the
    form of a node's value. ordered: returns an equal form whose core has
    its dimensions in the value's order. view: emits a call of a view op on a core, and returns the node.
    """

    def __init__(
        self,
        graph: fx.Graph,
        form: Callable[[fx.Node], Form],
        ordered: Callable[[Form], Form],
        view: Callable[..., fx.Node],
    ) -> None:
        self.graph, self.form, self.ordered, self.view = graph, form, ordered, view

    def follow(self, node: fx.Node) -> Form | None:
        """Emit the node's op on the cores of its inputs, and return the form of the node's value (see layout_form.py).

        Returns None for an op that is not known, or that cannot be applied to the cores.
        """
        if is_call(node, aten.cat.default):
            return self._cat(node)
        if is_call(node, aten.stack.default):
            return self._stack(node)
        if node.target in _BY_DIMENSION:
            return self._by_dimension(node)
        if is_call(node, aten.select.int, aten.unbind.int):
            return self._select(node)
        if is_call(node, aten.clone.default):
            form = self.form(arg(node, 0))  # in the core's order, so that no stride depends on the number of tokens
            return Form(emit_like(self.graph, node, form.core), form.dims)
        if is_call(node, aten.embedding.default):
            form = self.ordered(self.form(arg(node, 1)))
            core = emit_like(self.graph, node, arg(node, 0), form.core, *node.args[2:])
            return Form(core, (*form.dims, len(form.order)))
        if is_call(node, aten.native_layer_norm.default):
            form = self.ordered(self.form(arg(node, 0)))
            if None in form.dims[-len(arg(node, 1)) :]:
                return None
            return Form(emit_like(self.graph, node, form.core, *node.args[1:]), form.dims)
        if is_call(node, aten._to_copy.default) or _is_pointwise(node):
            return self._pointwise(node)
        return None

    def _by_dimension(self, node: fx.Node) -> Form | None:
        place, form = _BY_DIMENSION[node.target], self.form(arg(node, 0))  # type: ignore[index]
        args: list[Any] = [*node.args, *[0] * (place + 1 - len(node.args))]
        several = isinstance(args[place], list | tuple)
        dims = [form.dims[dim % form.rank] for dim in (args[place] if several else [args[place]])]
        if None in dims:
            return None
        last = len(form.order) - 1
        named = [-1 if dim == last else dim for dim in dims]  # as in textbook code
        args[0], args[place] = form.core, named if several else named[0]
        kept = form.dims
        if several and not (len(args) > 2 and args[2]):  # a reduction that drops its dimensions
            gone = sorted(dim for dim in dims if dim is not None)
            left = [dim for dim in kept if dim is None or dim not in gone]
            kept = tuple(None if dim is None else dim - sum(g < dim for g in gone) for dim in left)
        return Form(emit_like(self.graph, node, *args), kept)

    def _select(self, node: fx.Node) -> Form | None:
        form = self.form(arg(node, 0))
        place = (arg(node, 1) if len(node.args) > 1 else 0) % form.rank
        gone = form.dims[place]
        if gone is None:
            return None
        left = [*form.dims[:place], *form.dims[place + 1 :]]
        core = emit_like(self.graph, node, form.core, gone, *node.args[2:])
        return Form(core, tuple(None if dim is None else dim - (dim > gone) for dim in left))

    def _cat(self, node: fx.Node) -> Form | None:
        forms = [self.form(part) for part in arg(node, 0)]
        dim = (arg(node, 1) if len(node.args) > 1 else 0) % forms[0].rank
        if len({form.dims for form in forms}) > 1:
            forms = [self.ordered(form) for form in forms]
        place = forms[0].dims[dim]
        if len({form.dims for form in forms}) > 1 or place is None:
            return None
        named = -1 if place == len(forms[0].order) - 1 else place
        return Form(emit_like(self.graph, node, [form.core for form in forms], named), forms[0].dims)

    def _stack(self, node: fx.Node) -> Form | None:
        forms = [self.form(part) for part in arg(node, 0)]
        if len({form.dims for form in forms}) > 1:
            forms = [self.ordered(form) for form in forms]
        if len({form.dims for form in forms}) > 1:
            return None
        dims = forms[0].dims
        dim = (arg(node, 1) if len(node.args) > 1 else 0) % (len(dims) + 1)
        before = [d for d in dims[:dim] if d is not None]
        place = before[-1] + 1 if before else 0  # after its predecessors in the value
        moved = tuple(None if d is None else d + (d >= place) for d in dims)
        core = emit_like(self.graph, node, [form.core for form in forms], place)
        return Form(core, (*moved[:dim], place, *moved[dim:]))

    def _pointwise(self, node: fx.Node) -> Form | None:
        operands = [a for a in node.args if isinstance(a, fx.Node) and isinstance(a.meta["val"], torch.Tensor)]
        if not operands or any(isinstance(a, list | tuple) for a in node.args):
            return None
        forms = {operand: self._without_ones(self.form(operand)) for operand in operands}
        rank = max(form.rank for form in forms.values())
        # For each operand: dimension of the result -> dimension of its core.
        places = {
            operand: {rank - form.rank + i: dim for i, dim in enumerate(form.dims) if dim is not None}
            for operand, form in forms.items()
        }
        everything = sorted(set().union(*places.values()))
        covering = next((place for place in places.values() if len(place) == len(everything)), None)
        # If no operand has all dimensions, tokens come first, as everywhere.
        sizes = node.meta["val"].shape
        tokens_first = sorted(everything, key=lambda position: isinstance(sizes[position], int))
        order = sorted(everything, key=covering.__getitem__) if covering else tokens_first
        aligned = {operand: self._aligned(forms[operand].core, places[operand], order) for operand in operands}
        args = [aligned.get(a, a) if isinstance(a, fx.Node) else a for a in node.args]
        core = emit_like(self.graph, node, *args)
        where = {position: i for i, position in enumerate(order)}
        return Form(core, tuple(where.get(position) for position in range(rank)))

    def _without_ones(self, form: Form) -> Form:
        """Return an equal form whose core has no leading dimensions of size one; broadcasting adds them by itself.

        The last dimension is kept. A form whose core has a symbolic size is returned unchanged, so only the cores of
        parameters, and of values computed from parameters alone, lose dimensions.
        """
        sizes = list(form.core.meta["val"].shape)
        if not all(isinstance(size, int) for size in sizes):
            return form
        ones = next((i for i, size in enumerate(sizes[:-1]) if size != 1), max(0, len(sizes) - 1))
        if not ones:
            return form
        core = self.view(aten.view.default, form.core, sizes[ones:])
        return Form(core, tuple(None if dim is None or dim < ones else dim - ones for dim in form.dims))

    def _aligned(self, core: fx.Node, place: dict[int, int], order: list[int]) -> fx.Node:
        """Return a view of the core whose dimensions are in the given order.

        place: dimension of the op's result -> dimension of the core. order: the result's dimensions in the wanted
        order. Dimensions that the core lacks are added with size one, except leading ones, which broadcasting adds.
        """
        own = [place[position] for position in order if position in place]
        if own != sorted(own):
            core = self.view(aten.permute.default, core, own)
        started = False
        index = 0
        for position in order:
            if position in place:
                started = True
            elif started:
                core = self.view(aten.unsqueeze.default, core, index)
            else:
                continue  # broadcasting puts it in
            index += 1
        return core


def emit_like(graph: fx.Graph, node: fx.Node, *args: Any) -> fx.Node:
    """Emit a call of the node's op on the arguments `args`, with the node's keyword arguments, and return the call.

    Keywords that have no effect on a conversion (`_to_copy`) are left out.
    """
    given = {name: value for name, value in node.kwargs.items() if not _says_nothing(node, name)}
    new = graph.call_function(node.target, args, given)  # type: ignore[arg-type]
    values, keywords = fx.map_arg((args, given), lambda argument: argument.meta["val"])
    with fake_mode_of(values):
        new.meta["val"] = node.target(*values, **keywords)  # type: ignore[operator]
    return new


def _says_nothing(node: fx.Node, name: str) -> bool:
    """Return whether the node is a conversion (`_to_copy`), and its keyword `name` has no effect.

    This holds for `layout`, and for `device` if the input is on that device. `type_as` adds such keywords.
    """
    if not is_call(node, aten._to_copy.default):
        return False
    return name == "layout" or (name == "device" and node.kwargs[name] == arg(node, 0).meta["val"].device)


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
