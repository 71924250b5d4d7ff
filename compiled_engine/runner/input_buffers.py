"""The fixed buffers that a batch's inputs are written to: host arrays, and their copies on the device.

On a CPU the two are the same memory. On a GPU the host side is pinned and copied without blocking; captured graphs
read the device side, whose addresses never change.
"""

from __future__ import annotations

import numpy as np
import torch


class MirroredBuffer:
    """A host array and the device tensor that it is copied to."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=on_gpu)
        self.device = torch.zeros(shape, dtype=dtype, device=device) if on_gpu else self._host
        self.host: np.ndarray = self._host.numpy()

    def publish(self, length: int) -> None:
        """Copy the first `length` rows to the device."""
        if self.device is not self._host:
            self.device[:length].copy_(self._host[:length], non_blocking=True)


class InputBuffers:
    """Room for the largest step: max_num_tokens tokens, max_num_requests requests."""

    def __init__(self, max_num_tokens: int, max_num_requests: int, max_blocks: int, device: torch.device):
        self.input_ids_T = MirroredBuffer((max_num_tokens,), torch.int64, device)
        self.positions_T = MirroredBuffer((max_num_tokens,), torch.int64, device)
        self.slot_mapping_T = MirroredBuffer((max_num_tokens,), torch.int64, device)
        self.logits_rows_R = MirroredBuffer((max_num_requests,), torch.int64, device)
        self.query_start_loc_R1 = MirroredBuffer((max_num_requests + 1,), torch.int32, device)
        self.seq_lens_R = MirroredBuffer((max_num_requests,), torch.int32, device)
        self.block_table_RB = MirroredBuffer((max_num_requests, max_blocks), torch.int32, device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def reclaim(self) -> None:
        """Wait until the last batch was copied: only then may the host arrays be written again.

        A step that samples nothing ends without any wait, and its copies may still stand behind other work.
        """
        if self._copied is not None:
            self._copied.synchronize()

    def publish(self, num_tokens: int, num_requests: int) -> None:
        """Copy a batch's inputs to the device."""
        for per_token in (self.input_ids_T, self.positions_T, self.slot_mapping_T):
            per_token.publish(num_tokens)
        for per_request in (self.logits_rows_R, self.seq_lens_R, self.block_table_RB):
            per_request.publish(num_requests)
        self.query_start_loc_R1.publish(num_requests + 1)
        if self._copied is not None:
            self._copied.record()
