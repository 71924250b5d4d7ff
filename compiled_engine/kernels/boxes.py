"""TMA tiles ("boxes") of tensors, and their descriptors for launches of Hopper's kernels.

Triton validates each new descriptor and formats its type at each launch, which together cost the host more than the
launch itself. A Box is validated once, on first use, and quick launches identify the type by the box.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch


class Box:
    """The shape of a tensor's tile, and its layout in shared memory.

    Create each box once, since launches compare boxes by identity.
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
        """Return a TensorDescriptor of `base` with this tile. The descriptor's attribute `box` is this Box.

        The first call validates the sizes, and raises AssertionError if they do not fit. Later calls check nothing.
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
