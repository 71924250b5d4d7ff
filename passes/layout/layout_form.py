"""Defines Form, which describes a value as a view of another value: its core.

The view may permute the core's dimensions and add dimensions of size one. `normalise_layout` tracks the form of each
value in a graph. Ops then run on the cores, which have no batch dimension of one and are not transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from compiled_engine.passes.framework.matching import always_equal

Size = int | torch.SymInt


@dataclass(frozen=True)
class Form:
    """A value described as a view of `core`. Each dimension of the core occurs once in `dims`."""

    core: fx.Node
    dims: tuple[int | None, ...]  # for each dimension of the value, the core's dimension; None: size one

    @classmethod
    def of(cls, value: fx.Node) -> Form:
        """Return the trivial form of a value: its core is the value itself."""
        fake = value.meta["val"]
        return cls(value, tuple(range(fake.dim())) if isinstance(fake, torch.Tensor) else ())

    @property
    def order(self) -> tuple[int, ...]:
        """The indices of the core's dimensions, in the order that they have in the value."""
        return tuple(dim for dim in self.dims if dim is not None)

    @property
    def is_ordered(self) -> bool:
        return self.order == tuple(range(len(self.order)))

    @property
    def is_core(self) -> bool:
        return self.is_ordered and None not in self.dims

    @property
    def rank(self) -> int:
        return len(self.dims)

    def sizes(self) -> tuple[Size, ...]:
        """Return the shape of the described value."""
        shape = self.core.meta["val"].shape
        return tuple(1 if dim is None else shape[dim] for dim in self.dims)


def unsqueezed(form: Form, dim: int) -> Form:
    dim %= form.rank + 1
    return Form(form.core, (*form.dims[:dim], None, *form.dims[dim:]))


def squeezed(form: Form, dim: int) -> Form | None:
    """Return the form without the value's dimension `dim`, of size one; None if the core has this dimension."""
    dim %= form.rank
    return Form(form.core, (*form.dims[:dim], *form.dims[dim + 1 :])) if form.dims[dim] is None else None


def permuted(form: Form, order: Sequence[int]) -> Form:
    return Form(form.core, tuple(form.dims[dim] for dim in order))


def reshaped(form: Form, wanted: Sequence[Size]) -> tuple[list[Size] | None, tuple[int | None, ...]] | None:
    """Convert a reshape of the value to the shape `wanted` into a reshape of its core.

    Returns (core shape, dims): the core's new shape, None if it does not change, and `Form.dims` of the result. Returns
    None instead of a pair if the core cannot be reshaped accordingly: if dimensions would be merged that are not
    adjacent in the core, or if symbolic sizes leave open which dimensions correspond.
    """
    new_of: dict[int, list[int]] = {}  # first core dimension of a group -> the value's new dimensions from it
    merged: set[int] = set()
    stays = True
    groups = _groups(form.sizes(), wanted)
    if groups is None:
        return None
    for old, new in groups:
        cores = [form.dims[place] for place in old]
        real = [core for core in cores if core is not None]
        if not real:
            if not all(_is_one(wanted[place]) for place in new):
                return None
            continue
        # A leading one is a batch; a one from splitting a dimension is a single head.
        places = [place for place in new if place or not _is_one(wanted[place])] or new[:1]
        if real != list(range(real[0], real[0] + len(real))) or not places:
            return None
        stays &= len(real) == 1 and len(places) == 1
        new_of[real[0]] = list(places)
        merged.update(real[1:])
    sizes: list[Size] = []
    dims: list[int | None] = [None] * len(wanted)
    for core in range(len(form.order)):
        if core in merged:
            continue
        if core not in new_of:
            return None
        for place in new_of[core]:
            dims[place] = len(sizes)
            sizes.append(wanted[place])
    return (None if stays else sizes), tuple(dims)


def _groups(old: Sequence[Size], new: Sequence[Size]) -> list[tuple[list[int], list[int]]] | None:
    """Return the smallest groups of consecutive old and new dimensions with equal element counts, from the left.

    (2, 3, 4) and (6, 4) give [([0, 1], [0]), ([2], [1])]. Returns None if symbolic sizes leave the groups open.
    """
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = list(range(i, min(i + 1, len(old)))), list(range(j, min(j + 1, len(new))))
        i, j = i + len(left), j + len(right)
        while not always_equal(_product(old, left), _product(new, right)):
            if i < len(old) and (j == len(new) or _is_less(_product(old, left), _product(new, right))):
                left.append(i)
                i += 1
            elif j < len(new):
                right.append(j)
                j += 1
            else:
                return None
        groups.append((left, right))
    return groups


def _product(shape: Sequence[Size], places: list[int]) -> Size:
    result: Size = 1
    for place in places:
        result = result * shape[place]
    return result


def _is_less(left: Size, right: Size) -> bool:
    """Return whether the element count `left` is less than `right`. An int counts as less than a symbolic size.

    The result is False if `left` is symbolic.
    """
    return left < right if isinstance(left, int) and isinstance(right, int) else isinstance(left, int)


def _is_one(size: Size) -> bool:
    return isinstance(size, int) and size == 1
