"""Chooses which of a model's layers to trace. repeated_layers.py adds the others to the graph, as copies of these.

Tracing takes a fixed time per op, so a trace of all layers of a deep model takes many times as long as one of a few. A
`LayerStack` applies its layers one after another in the same way, so layers with equal modules give equal ops. If there
are several equal layers (LayerClass), at least two of them are traced: one is copied, and the other compared with it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from compiled_engine.graphs.compiler.layer_slices import slice_of
from compiled_engine.models.textbook.layers import LayerStack
from compiled_engine.passes.framework.graph_inputs import Source, source_of
from compiled_engine.passes.framework.parameter import Parameter


class LayerClass(NamedTuple):
    """A class of layers that give equal ops in a trace: their kind, and the kind of the layer after them.

    Layers have the same kind if their modules are equal. The next layer matters because a layer's ops are taken to end
    at the first use of the next layer's parameters, so they include the next layer's first ops. following: None for the
    last layer.
    """

    kind: int
    following: int | None


@dataclass(frozen=True)
class TracedLayers:
    """A stack of layers, and the numbers of the layers that are traced.

    The layers are chosen so that each has the same LayerClass in the trace as in the whole stack: it is followed by a
    layer of the same kind in both. In a model of transformers' code, layers that are not traced are replaced by
    identities.
    """

    stack: nn.ModuleList
    path: str
    classes: tuple[LayerClass, ...]  # of all layers that are used
    numbers: tuple[int, ...]  # traced layers
    in_tuple: bool = False  # layers return a tuple
    has_caches: bool = True  # the layers' KV caches have their numbers

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Make the stack apply only the traced layers within a block."""
        if isinstance(self.stack, LayerStack):
            self.stack.only = self.numbers
            try:
                yield
            finally:
                self.stack.only = None
            return
        every = list(self.stack)
        for number in set(range(len(self.classes))) - set(self.numbers):
            self.stack[number] = _Identity(every[number], self.in_tuple)
        try:
            yield
        finally:
            for number, layer in enumerate(every):
                self.stack[number] = layer

    def gaps(self) -> list[tuple[int, int]]:
        """Return, for each gap between traced layers, (number of the layer before it, number of the layer after it)."""
        return [(before, behind) for before, behind in pairwise(self.numbers) if behind > before + 1]

    def traced_in_class(self, layer_class: LayerClass) -> list[int]:
        return [number for number in self.numbers if self.classes[number] == layer_class]

    def layer_of(self, node: fx.Node) -> int | None:
        """Return the number of the layer whose parameter, KV cache or slice a node is; None for any other node.

        A slice belongs to a layer if its tensor has one for each layer, see layer_slices.py.
        """
        if (sliced := slice_of(node)) is not None:
            return sliced.place if sliced.places == len(self.stack) else None
        if node.op != "placeholder" or source_of(node).kind == "size":
            return None
        found = self._numbered(source_of(node).name)
        return int(found["layer"]) if found else None

    def of_layer(self, source: Source | Parameter, layer: int) -> Source | Parameter:
        """Return the source of the graph input that is to layer number `layer` as `source` is to its own layer.

        For example, model.layers.7.mlp.down_proj.weight for model.layers.0.mlp.down_proj.weight and 7.
        """

        def rename(name: str) -> str:
            found = self._numbered(name)
            assert found is not None
            return f"{found['owner']}.{layer}{found['rest']}"

        return source.renamed(rename) if isinstance(source, Parameter) else replace(source, name=rename(source.name))

    def _numbered(self, name: str) -> re.Match[str] | None:
        owners = "|".join([re.escape(self.path), *(["kv_caches"] if self.has_caches else ())])
        return re.fullmatch(rf"(?P<owner>{owners})\.(?P<layer>\d+)(?P<rest>.*)", name)


class _Identity(nn.Module):
    """A module that returns its first argument, in a tuple if `in_tuple` is set.

    It replaces a layer of transformers' code that is not traced, and has that layer's plain attributes, since the loop
    over layers may read them: Nemotron-H's chooses a mask by `block_type`.
    """

    def __init__(self, layer: nn.Module, in_tuple: bool) -> None:
        super().__init__()
        plain = (str, int, float, type(None))
        vars(self).update({name: value for name, value in vars(layer).items() if isinstance(value, plain)})
        self.in_tuple = in_tuple

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        return (hidden_states, None, None) if self.in_tuple else hidden_states


def traced_layers(model: nn.Module) -> tuple[TracedLayers, ...]:
    """Return, for each stack with layers that need not be traced, which layers are traced.

    Layers of transformers' code have their number as an attribute, which is ignored when layers are compared. Whether
    a layer's computation depends on its number is known from `layer_signatures`, recorded when the model was observed
    (models/foreign/observation.py). Layers at the end of the stack that have no signature are not used. A model of
    transformers' code may also have `stacks_without_caches`: (path, signatures) of each further stack.
    """
    stacks: list[tuple[str, Any]] = [(path, m) for path, m in model.named_modules() if type(m) is LayerStack]
    if foreign := str(getattr(model, "layers_path", "")):
        stated: Any = model
        named = [(foreign, stated.layer_signatures), *getattr(model, "stacks_without_caches", ())]
        found = [
            _of_stack(
                path,
                model.get_submodule(path),
                signatures,
                beside=("layer_idx",),
                in_tuple=path == foreign and stated.layers_in_tuple,
                has_caches=path == foreign,
            )
            for path, signatures in named
        ]
    elif len(stacks) == 1:
        ((path, stack),) = stacks
        found = [_of_stack(path, stack, [0] * len(stack))]
    else:
        found = []
    return tuple(layers for layers in found if layers is not None)


def _of_stack(
    path: str,
    stack: Any,
    signatures: Sequence[Any],
    beside: Sequence[str] = (),
    *,
    in_tuple: bool = False,
    has_caches: bool = True,
) -> TracedLayers | None:
    """Return which layers of a stack are traced; None if all of them must be traced.

    signatures, beside: see `_kinds`. in_tuple, has_caches: see TracedLayers.
    """
    if _shares(stack):
        return None
    kinds = _kinds(stack[: len(signatures)], signatures, beside)
    classes = tuple(map(LayerClass, kinds, [*kinds[1:], None]))
    numbers = _chosen(classes)
    return TracedLayers(stack, path, classes, numbers, in_tuple, has_caches) if len(numbers) < len(classes) else None


def _kinds(stack: nn.ModuleList, signatures: Sequence[Any], beside: Sequence[str]) -> list[int]:
    """Return for each layer its kind: the number of the first layer that equals it.

    signatures: a value for each layer; layers with different values are not equal. beside: names of attributes in
    which equal layers may differ.
    """
    kinds: list[int] = []
    for number, layer in enumerate(stack):
        alike = (
            kind
            for kind in dict.fromkeys(kinds)
            if signatures[kind] == signatures[number] and _alike(stack[kind], layer, beside)
        )
        kinds.append(next(alike, number))
    return kinds


def _chosen(classes: Sequence[LayerClass]) -> tuple[int, ...]:
    """Return the numbers of the layers to trace, ascending: the first, the last, and at least two of each class.

    Of two layers of a class, one is copied, and the other is compared with it. If a class has only one layer, it is
    traced.
    """
    chosen, seen = [0], Counter([classes[0]])
    while chosen[-1] < len(classes) - 1:
        following = chosen[-1] + 1
        for number in range(following + 1, len(classes)):
            if seen[classes[number - 1]] < 2:
                break
            if classes[number].kind == classes[chosen[-1]].following:
                following = number
        chosen.append(following)
        seen[classes[following]] += 1
    return tuple(chosen)


def _shares(stack: nn.ModuleList) -> bool:
    """Return whether a module or parameter occurs more than once in the stack, so that layers may share it."""
    modules, parameters = stack.named_modules, stack.named_parameters
    return any(len([*all_of(remove_duplicate=False)]) > len([*all_of()]) for all_of in (modules, parameters))


def _alike(first: nn.Module, second: nn.Module, beside: Sequence[str]) -> bool:
    """Return whether two modules have the same class, attributes and parameter shapes, and so do their children.

    beside: names of attributes that may differ.
    """
    held = ("_parameters", "_buffers", "_modules", *beside)
    settings, other_settings = ({k: v for k, v in vars(m).items() if k not in held} for m in (first, second))
    children, other_children = (list(module.named_children()) for module in (first, second))
    return (
        type(first) is type(second)
        and settings.keys() == other_settings.keys()
        and all(_equal(value, other_settings[name]) for name, value in settings.items())
        and _tensors(first) == _tensors(second)
        and [name for name, _ in children] == [name for name, _ in other_children]
        and all(_alike(one, other, beside) for (_, one), (_, other) in zip(children, other_children, strict=True))
    )


def _equal(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if isinstance(first, partial) and isinstance(second, partial):  # partials compare by identity
        return all(_equal(getattr(first, part), getattr(second, part)) for part in ("func", "args", "keywords"))
    try:
        return type(first) is type(second) and bool(first == second)
    except Exception:  # tensors, for example, do not compare to one bool
        return False


def _tensors(module: nn.Module) -> list[Any]:
    """Return name, shape, strides, dtype and device of each parameter and buffer of a module, without submodules."""
    own = module._parameters | module._buffers
    return [(name, t if t is None else (t.shape, t.stride(), t.dtype, t.device)) for name, t in own.items()]
