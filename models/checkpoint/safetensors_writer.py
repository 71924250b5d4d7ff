"""Write a safetensors file one tensor at a time.

The names, dtypes and shapes of all tensors are written first; their values can then be written in any order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch


class Described(NamedTuple):
    """The description of a tensor to write. dtype: in the spelling of safetensors, such as BF16."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class SafetensorsWriter:
    """A safetensors file that is open for writing. The values of tensors that are not passed to `write` are zeros."""

    def __init__(self, path: Path, tensors: Mapping[str, Described]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        # Sorted by element size, largest first, so that each tensor is aligned to its element size.
        for name in sorted(tensors, key=lambda name: -_element_bytes(tensors[name])):
            dtype, shape, nbytes = tensors[name]
            start, end = end, end + nbytes
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
            self._places[name] = start, nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._begin = self._file.tell()
        self._file.truncate(self._begin + end)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the values of the tensor `name`. Raises ValueError unless its size in bytes is the declared one."""
        start, nbytes = self._places[name]
        if tensor.nbytes != nbytes:
            raise ValueError(f"{name} takes {tensor.nbytes} bytes, but {nbytes} were stated")
        self._file.seek(self._begin + start)
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _element_bytes(tensor: Described) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return tensor.nbytes // count if count else 0
