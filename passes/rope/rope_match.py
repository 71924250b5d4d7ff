"""Recognises rotary embeddings of queries and keys in graphs.

A match gives the rotated part of each head, which elements are rotated together as a pair, and the angles.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from compiled_engine.attention.op import ATTENTION
from compiled_engine.passes.framework.matching import always_equal, arg, aten, factors, is_call, through_cast
from compiled_engine.passes.norm.norms import Norm, norm_of, why_no_norm

# Ops allowed between an angle and the query it rotates: the arithmetic of rotations, and views.
_ROTATING = (
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.cat.default, aten.stack.default, aten.select.int),
    *(aten.slice.Tensor, aten.unsqueeze.default, aten.reshape.default, aten.view.default, aten._to_copy.default),
    *(aten.clone.default, aten.expand.default, aten.alias.default, aten.permute.default, aten.transpose.int),
)


class RopeForm(NamedTuple):
    """The variant of a rotation. Names and order of the fields are those of the last fields of inputs.Rotation."""

    rotary_dim: int = 0  # rotated elements at the start of a head; 0: all
    interleaved: bool = False  # pairs are neighbours, otherwise half a head apart
    wide: bool = False  # products and sum are in fp32 and rounded once, otherwise each is rounded
    norm_last: bool = False  # the norm, if any, follows the rotation


@dataclass(frozen=True)
class Rotated:
    """A recognised rotation: the nodes that the rotated value is computed from, and the variant of the rotation."""

    x: fx.Node
    norm_weight: fx.Node | None  # None without a norm
    how: tuple[float, float, bool]  # (eps, offset, wide) of the norm
    cos: fx.Node  # like sin, per rotated element or per pair
    sin: fx.Node
    form: RopeForm
    scale: fx.Node | None = None  # [T, 1, 1], a factor applied after the rotation, or None


class _Turn(NamedTuple):
    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    interleaved: bool


def match_rotation(value: fx.Node) -> Rotated | str:
    """Return the rotation that computes a value, or why the value is not recognised as one.

    An RMSNorm may precede or follow the rotation, and a multiplication by a factor per token may follow it.
    """
    for product, scale in factors(value):
        if scale.meta["val"].dim() == 3 and scale.meta["val"].shape[1:] == (1, 1):
            found = _match_turn(product)
            if isinstance(found, Rotated) and found.norm_weight is None:
                return replace(found, scale=scale)
            return "a product follows the rotation"
    norm = _rms_norm(value)
    found = _match_turn(norm.x if isinstance(norm, Norm) else value)
    if not isinstance(norm, Norm) or isinstance(found, str):
        return found
    if found.norm_weight is not None:
        return "norms precede and follow the rotation"
    return replace(found, norm_weight=norm.weight, how=norm.how, form=found.form._replace(norm_last=True))


def _rms_norm(value: fx.Node) -> Norm | str | None:
    """Return the RMSNorm that computes the value, or why a value that looks like the result of a norm does not match.

    Returns None for any other value, and for the result of a LayerNorm.
    """
    norm = norm_of(value)
    return why_no_norm(value) if norm is None or norm.centred else norm


def _match_turn(value: fx.Node) -> Rotated | str:
    whole, rotary_dim = _whole_and_rest(value)
    turned: Any = through_cast(whole)
    wide = turned is not whole
    if wide and turned.meta["val"].dtype != torch.float32:
        return "a cast follows the rotation"
    turns = [*_as_sum(turned), *_as_halves(turned)]
    if not turns:
        rotation = is_call(turned, aten.add.Tensor) and not turned.kwargs
        return "it is not x * cos + (-second half, first half) * sin of one x" if rotation else "it is not rotated"
    x: Any
    x, cos, sin, interleaved = turns[0]
    if x.meta["val"].dtype != whole.meta["val"].dtype:
        return "a cast follows the rotation"
    if rotary_dim:
        part, x = x, arg(x, 0) if is_call(x, aten.slice.Tensor) else x
        if not _is_slice(part, x, 0, rotary_dim) or not _is_slice(arg(value, 0)[1], x, rotary_dim, None):
            return "what is not rotated is not the rest of each head"
    if interleaved:
        cos, sin = _of_pairs(cos), _of_pairs(sin)
    form = RopeForm(rotary_dim, interleaved, wide)
    normed = _rms_norm(x)
    if isinstance(normed, str):
        return normed
    if normed is None:
        return Rotated(x, None, (0.0, 0.0, False), cos, sin, form)
    return Rotated(normed.x, normed.weight, normed.how, cos, sin, form)


def _whole_and_rest(value: fx.Node) -> tuple[fx.Node, int]:
    """Return (rotated part, its size) if only the first part of each head is rotated; otherwise (value, 0)."""
    if is_call(value, aten.cat.default) and len(value.args) == 2 and len(arg(value, 0)) == 2:
        part, rest = arg(value, 0)
        if is_last(arg(value, 1), value) and is_call(rest, aten.slice.Tensor):
            return part, part.meta["val"].shape[-1]
    return value, 0


def _as_sum(value: Any) -> Iterator[_Turn]:
    """Yield each way in which a value matches x * cos + turned(x) * sin.

    turned(x), rotate_half in transformers, is (-second, first). first and second are the halves of x, or the two
    elements of each pair of neighbours.
    """
    if not is_call(value, aten.add.Tensor) or value.kwargs:
        return
    for straight, turned in (value.args, value.args[::-1]):
        for turned_x, sin in factors(turned):
            for x, cos in factors(straight):
                for interleaved in (False, True):
                    source = _turned_from(_before_widening(turned_x), interleaved)
                    if source is not None and _before_widening(source) is _before_widening(x):
                        yield _Turn(_before_widening(x), cos, sin, interleaved)


def _before_widening(value: fx.Node) -> fx.Node:
    """Return the input of a cast to fp32; return any other value unchanged.

    Matchers call this function before and after the swap of the elements, since the cast may be on either side.
    """
    return through_cast(value) if value.meta["val"].dtype == torch.float32 else value


def _as_halves(value: Any) -> Iterator[_Turn]:
    """Yield each way in which a value matches cat(first * cos - second * sin, second * cos + first * sin).

    first, second: the halves of x. cos and sin have a value per pair of elements.
    """
    if not is_call(value, aten.cat.default) or len(value.args) != 2 or len(arg(value, 0)) != 2:
        return
    difference, total = arg(value, 0)
    is_pair = is_call(difference, aten.sub.Tensor) and is_call(total, aten.add.Tensor)
    if not is_pair or difference.kwargs or total.kwargs or not is_last(arg(value, 1), value):
        return
    for first, cos in factors(difference.args[0]):
        for second, sin in factors(difference.args[1]):
            x = half_of(first, 0)
            wanted = [{second, cos}, {first, sin}]
            found = [set(product.all_input_nodes) for product in total.args if is_call(product, aten.mul.Tensor)]
            if x is not None and half_of(second, 1) is x and found in (wanted, wanted[::-1]):
                yield _Turn(_before_widening(x), cos, sin, False)


def _turned_from(node: Any, interleaved: bool) -> fx.Node | None:
    """Return x if the node is turned(x), x with its halves swapped and one negated; otherwise None. See `_as_sum`.

    interleaved: for pairs of neighbouring elements rather than halves.
    """
    if interleaved:
        node = node.args[0] if is_call(node, aten.view.default, aten.reshape.default) else None
    target = aten.stack.default if interleaved else aten.cat.default
    if not is_call(node, target) or len(node.args) != 2 or len(arg(node, 0)) != 2:
        return None
    (negated, first), dim = node.args
    if not is_call(negated, aten.neg.default) or not is_last(dim, node):
        return None
    piece = every_second if interleaved else half_of
    x = piece(first, 0)
    return x if x is not None and piece(arg(negated, 0), 1) is x else None


def half_of(node: Any, index: int) -> fx.Node | None:
    """Return x if the node is the first (index 0) or second half of x's last dimension; otherwise None.

    The half may be taken by a split or by a slice.
    """
    if is_call(node, operator.getitem) and is_call(node.args[0], aten.split.Tensor):
        x, size, *dim = node.args[0].args
        if node.args[1] == index and dim and is_last(dim[0], x) and 2 * size == x.meta["val"].shape[-1]:
            return x
    if is_call(node, aten.slice.Tensor) and len(node.args) == 4:
        x, dim, start, end = node.args
        size = x.meta["val"].shape[-1]
        if is_last(dim, x) and (start, min(end, size)) == ((0, size // 2), (size // 2, size))[index]:
            return x
    return None


def every_second(node: Any, index: int) -> fx.Node | None:
    """Return x if the node is every second element of x's last dimension, from element `index` on; otherwise None."""
    if not is_call(node, aten.slice.Tensor) or len(node.args) != 5:
        return None
    x, dim, start, end, step = node.args
    return x if is_last(dim, x) and (start, step) == (index, 2) and end >= x.meta["val"].shape[-1] else None


def _is_slice(node: Any, x: fx.Node, start: int, end: int | None) -> bool:
    """Return whether the node is x[..., start:end]. end: None for the end of the dimension."""
    if not is_call(node, aten.slice.Tensor) or len(node.args) != 4 or node.args[0] is not x:
        return False
    size = x.meta["val"].shape[-1]
    return is_last(node.args[1], x) and (node.args[2], min(node.args[3], size)) == (start, size if end is None else end)


def _of_pairs(angles: Any) -> fx.Node:
    """Return the node of cos or sin with one value per pair, [T, 1, r / 2], if each value in `angles` follows itself.

    angles: the node of cos or sin, which is returned if its values are not repeated so. If the graph has no unsqueeze
    of the values before their repetition, one is added.
    """
    view: Any = angles.args[0] if is_call(angles, aten.unsqueeze.default) and angles.args[1] == 1 else None
    clone: Any = view.args[0] if is_call(view, aten.view.default, aten.reshape.default) else None
    expand: Any = clone.args[0] if is_call(clone, aten.clone.default) else None
    column: Any = expand.args[0] if is_call(expand, aten.expand.default) else None
    if not (is_call(column, aten.unsqueeze.default) and column.args[1] == 2 and column.args[0].meta["val"].dim() == 2):
        return angles
    pairs: Any = column.args[0]
    if expand.meta["val"].shape[2] != 2 or not always_equal(pairs.meta["val"].stride(-1), 1):
        return angles
    known = (user for user in pairs.users if is_call(user, aten.unsqueeze.default) and user.args[1] == 1)
    found: fx.Node | None = next(known, None)
    if found is not None:
        return found
    graph = pairs.graph
    with graph.inserting_after(pairs):
        found = graph.call_function(aten.unsqueeze.default, (pairs, 1))
    found.meta["val"] = pairs.meta["val"].unsqueeze(1)
    return found


def is_last(dim: int, x: fx.Node) -> bool:
    return dim in (-1, x.meta["val"].dim() - 1)


def rotary_attentions(graph: fx.Graph) -> int:
    """Return the number of attention calls with rotary queries: computed from a cosine, with no linear in between.

    The passes that fuse rotary attention must match as often.
    """
    return sum(_is_made_with_cosines(arg(call, 0)) for call in graph.find_nodes(op="call_function", target=ATTENTION))


def _is_made_with_cosines(query: Any) -> bool:
    pending, seen = [query], set()
    while pending:
        node = pending.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        if is_call(node, aten.cos.default):
            return True
        if is_call(node, *_ROTATING):
            pending += node.all_input_nodes
    return False
