"""Gathers rows of all layers into a buffer on the same device, and scatters them back, on a GPU in one launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from compiled_engine.rows.staged_writes import upload

WORD = 8


class LayerRows:
    """Copies rows of several tensors, each [N, ...] with contiguous rows, to a buffer and back.

    Row r of the buffer holds the bytes of one row of the first tensor, then those of the same row of the next tensor,
    and so on. Bytes are copied in words of 8 if all sizes and addresses allow it. Empty tensors are left out.

    triton: whether a Triton kernel makes the copies; None: on CUDA only.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], triton: bool | None = None) -> None:
        in_bytes = [each.view(len(each), -1).view(torch.uint8) for each in tensors if each.numel()]
        fit = all((each.data_ptr() | each.stride(0) | each.shape[1]) % WORD == 0 for each in in_bytes)
        self._word = torch.int64 if fit else torch.uint8
        self._tensors = [each.view(self._word) for each in in_bytes]
        device = self._tensors[0].device
        self._table: torch.Tensor | None = None  # the kernel's layers
        uses_kernel = device.type == "cuda" if triton is None else triton
        if uses_kernel:
            sizes = [each.shape[1] for each in self._tensors]
            starts = np.cumsum([0, *sizes[:-1]])
            fields = [(each.data_ptr(), each.stride(0), each.shape[1]) for each in self._tensors]
            self._table = upload(np.column_stack([np.array(fields, np.int64), starts.astype(np.int64)]), device)
            self._most_words = max(sizes)

    def gather(self, rows: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copy rows of all tensors to a buffer.

        rows: int64 [R]. buffer: uint8 [R, bytes of a row of all tensors], contiguous.
        """
        if self._table is not None:
            self._launch(self._table, rows, buffer, gathers=True)
            return
        for tensor, part in self._parts(buffer):
            part.copy_(tensor.index_select(0, rows))

    def scatter(self, rows: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copy a buffer to rows of all tensors. `rows` must be distinct. For shapes see `gather`."""
        if self._table is not None:
            self._launch(self._table, rows, buffer, gathers=False)
            return
        for tensor, part in self._parts(buffer):
            tensor.index_copy_(0, rows, part)

    def _launch(self, table: torch.Tensor, rows: torch.Tensor, buffer: torch.Tensor, *, gathers: bool) -> None:
        from compiled_engine.features.kv_offload.layer_rows_kernel import launch  # Triton is not installed everywhere

        launch(table, rows, buffer.view(self._word), self._most_words, gathers=gathers)

    def _parts(self, buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor [N, words] and its part of the buffer."""
        sizes = [tensor.shape[1] for tensor in self._tensors]
        yield from zip(self._tensors, buffer.view(self._word).split(sizes, 1), strict=True)
