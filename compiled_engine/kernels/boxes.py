"""Boxes of tensors that Hopper's kernels copy, and their descriptors as launches take them.

Triton checks each descriptor that is made, and writes out its type at each launch: together that takes the host longer
than the launch. A Box is checked where it is first used, and a quick launch knows the type by the box itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch


class Box:
    """A box of a tensor, and its layout in shared memory; made once for each, since launches tell boxes by identity."""

    def __init__(self, shape: Sequence[int], layout: Any):
        self._shape, self._layout = list(shape), layout
        self._checked = False

    @cached_property
    def _descriptor(self) -> type[Any]:
        # Gluon takes a while to import, and only a Hopper needs it.
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor

    def of(self, base: torch.Tensor, shape: list[int], strides: list[int]) -> Any:
        """Return a TensorDescriptor of such boxes of a tensor; `box` is this one.

        Raises AssertionError for sizes that do not fit, when the box is first used.
        """
        if self._checked:
            found = object.__new__(self._descriptor)  # further fields have their defaults
            found.base, found.shape, found.strides = base, shape, strides
            found.block_shape, found.layout = self._shape, self._layout
        else:
            found = self._descriptor(base, shape, strides, self._shape, self._layout)
            self._checked = True
        found.box = self
        return found
