"""Argmax and the k largest of logits.

On the CPU numpy does both: for 32 x 4096 float32 its argmax takes 5 microseconds against torch's 80, and its
sort 0.2 ms against 17.
"""

from __future__ import annotations

import numpy as np
import torch


def argmax(logits_RV: torch.Tensor) -> torch.Tensor:
    """The index of each row's largest element, the first one if there are several: int64 [R]."""
    if logits_RV.device.type == "cpu":
        return torch.from_numpy(logits_RV.numpy().argmax(axis=-1))
    return logits_RV.argmax(dim=-1)


def largest(logits_RV: torch.Tensor, k: int) -> torch.Tensor:
    """Each row's k largest elements in ascending order: [R, k]."""
    vocab_size = logits_RV.shape[-1]
    if logits_RV.device.type == "cpu":
        values = logits_RV.numpy()
        if k < vocab_size:
            values = np.partition(values, vocab_size - k, axis=-1)[:, vocab_size - k :]
        return torch.from_numpy(np.sort(values, axis=-1))
    if k < vocab_size:
        return logits_RV.topk(k, dim=-1).values.flip(-1)
    return logits_RV.sort(dim=-1).values
