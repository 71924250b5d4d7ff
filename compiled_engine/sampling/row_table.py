"""The sampling parameters of every row, on the host and, for kernels to look up by row, on the device.

All fields lie in one buffer, so that publishing them is one copy. It is made in the stream's order from a pinned
snapshot: a step in flight reads what was published before it, and the host may go on writing.
"""

from __future__ import annotations

import numpy as np
import torch

# Name -> type. inverse_temperature is 0 for greedy rows; the additions' fields are described in logit_additions.py;
# allowed_mask: which mask of allowed_tokens.py the row has, -1 for none.
FIELDS = {
    "inverse_temperature": torch.float32,
    "seed": torch.int64,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "repetition_penalty": torch.float32,
    "frequency_penalty": torch.float32,
    "presence_penalty": torch.float32,
    "additions_start": torch.int32,
    "additions_count": torch.int32,
    "prefixes_start": torch.int32,
    "allowed_mask": torch.int32,
}
ALIGNMENT = 256


class RowTable:
    """`host[name]` and `device[name]` are the fields, [num_rows] each; on a CPU they are the same memory."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        offsets, size = {}, 0
        for name, dtype in FIELDS.items():
            offsets[name] = size
            size += -(-num_rows * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self._host = torch.zeros(size, dtype=torch.uint8)
        self._device = self._host.to(device)
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, torch.Tensor] = {}
        for name, dtype in FIELDS.items():
            part = slice(offsets[name], offsets[name] + num_rows * dtype.itemsize)
            self.host[name] = self._host[part].view(dtype).numpy()
            self.device[name] = self._device[part].view(dtype)
        self._changed = False

    def set_row(self, row: int | slice, **values: float) -> None:
        """Set these fields of a row, or of several, to be published."""
        for name, value in values.items():
            self.host[name][row] = value
        self._changed = True

    def publish(self) -> None:
        """Bring the device up to date, if anything changed; the host does not wait."""
        if self._changed and self._device is not self._host:
            self._device.copy_(self._host.pin_memory(), non_blocking=True)
        self._changed = False
