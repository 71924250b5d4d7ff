"""The token masks of a step on the device, and their application on the CPU; edits_triton.py has the kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from compiled_engine.sampling.async_copies import upload


@dataclass(frozen=True)
class StepMasks:
    """Of S rows of logits, M of which have a mask (see token_mask.py); both int32.

    masks_MW: the masks, W words each. mask_index_S: which of them is a row's; -1 for none.
    """

    masks_MW: torch.Tensor
    mask_index_S: torch.Tensor

    @classmethod
    def of(cls, words_MW: np.ndarray, mask_index_S: np.ndarray, device: torch.device) -> StepMasks:
        """From the host, which does not wait; M is at least 1."""
        return cls(upload(words_MW, device), upload(mask_index_S.astype(np.int32), device))

    def select(self, index_R: torch.Tensor) -> StepMasks:
        """Those of some rows (int64 [R], on the device)."""
        return replace(self, mask_index_S=self.mask_index_S.index_select(0, index_R))


def forbid_(logits_RV: torch.Tensor, masks: StepMasks) -> None:
    """Set the logits of tokens that a row's mask does not allow to minus infinity, in place, on the CPU.

    logits_RV: float32 [R, V], for the R rows of the masks.
    """
    vocab_size = logits_RV.shape[1]
    words_MW = masks.masks_MW.numpy().astype("<i4", copy=False)
    for logits_V, mask in zip(logits_RV.numpy(), masks.mask_index_S.tolist(), strict=True):
        if mask >= 0:
            allowed_V = np.unpackbits(words_MW[mask].view(np.uint8), count=vocab_size, bitorder="little")
            logits_V[allowed_V == 0] = -np.inf
