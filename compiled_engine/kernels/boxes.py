"""Makes TMA descriptors for launches of Hopper kernels. A Box is the tile ("box") that a TMA copy transfers.

Triton validates each new descriptor, and formats its type for each launch; together this costs the host more than the
launch itself. A Box validates only its first descriptor, and quick launches (launcher.py) identify the type by the Box.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch


class Box:
    """The shape of the tile ("box") that a TMA copy transfers, and the tile's layout in shared memory.

    Create each box once and keep it, since quick launches compare boxes by identity.
    """

    def __init__(self, shape: Sequence[int], layout: Any):
        self._shape, self._layout = list(shape), layout
        self._checked = False

    @cached_property
    def _descriptor(self) -> type[Any]:
        # Gluon is slow to import, and only Hopper needs it.
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor

    def of(self, base: torch.Tensor, shape: list[int], strides: list[int]) -> Any:
        """Return a TensorDescriptor for copies of this tile from or to `base`. Its attribute `box` is this Box.

        shape, strides: the shape, and the strides in elements, of the view of `base` that is copied. The first call
        validates them and raises AssertionError if TMA does not support them. Later calls validate nothing.
        """
        if self._checked:
            found = object.__new__(self._descriptor)  # skips validation; other fields keep their defaults
            found.base, found.shape, found.strides = base, shape, strides
            found.block_shape, found.layout = self._shape, self._layout
        else:
            found = self._descriptor(base, shape, strides, self._shape, self._layout)
            self._checked = True
        found.box = self
        return found
