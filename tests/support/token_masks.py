"""Token masks for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compiled_engine.sampling.edits import StepMasks
from compiled_engine.sampling.token_mask import num_words

WAYS_TO_FAIL = ("raises", "allows nothing", "too long", "wrong type", "no array")


def packed(token_ids: Sequence[int], vocab_size: int, *, garbage: bool = False) -> np.ndarray:
    """Return a mask that allows these tokens; `garbage` sets the bits beyond the vocabulary."""
    bits = np.zeros(num_words(vocab_size) * 32, np.uint8)
    bits[list(token_ids)] = 1
    bits[vocab_size:] = garbage
    return np.packbits(bits, bitorder="little").view(np.int32)


def step_masks(masks_S: Sequence[np.ndarray | None], device: str | torch.device) -> StepMasks:
    """Return the masks of a step. masks_S: a mask, or None, for each row; at least one is a mask."""
    given = [mask for mask in masks_S if mask is not None]
    has_mask_S = np.array([mask is not None for mask in masks_S])
    index_S = np.where(has_mask_S, np.cumsum(has_mask_S) - 1, -1)
    return StepMasks.of(np.stack(given), index_S, torch.device(device))


class OneOf:
    """A mask that lets the output be one of several token sequences, then the end. One array serves all calls."""

    def __init__(self, sequences: Sequence[Sequence[int]], vocab_size: int) -> None:
        self.sequences = [list(sequence) for sequence in sequences]
        self.vocab_size = vocab_size
        self.num_calls = 0
        self._array = packed([], vocab_size)

    def allowed(self, output_token_ids: Sequence[int]) -> np.ndarray:
        self.num_calls += 1
        so_far = list(output_token_ids)
        count = len(so_far)
        following = [s[count] for s in self.sequences if s[:count] == so_far and len(s) > count]
        assert following, f"{so_far} is not the beginning of any sequence"
        self._array[:] = packed(following, self.vocab_size, garbage=True)
        return self._array


@dataclass(frozen=True)
class ByLastToken:
    """A mask whose allowed tokens depend on the last token and on the number of tokens.

    It fails in the way `way` once there are `failing_after` tokens.
    """

    vocab_size: int
    failing_after: int | None = None
    way: str = "raises"

    def token_ids(self, output_token_ids: Sequence[int]) -> list[int]:
        last = output_token_ids[-1] if output_token_ids else 0
        return [i for i in range(self.vocab_size) if (i * i + last + len(output_token_ids)) % 3]

    def allowed(self, output_token_ids: Sequence[int]) -> np.ndarray:
        mask = packed(self.token_ids(output_token_ids), self.vocab_size, garbage=True)
        if len(output_token_ids) != self.failing_after:
            return mask
        if self.way == "raises":
            raise LookupError("injected")
        failed = {
            "allows nothing": packed([], self.vocab_size, garbage=True),
            "too long": np.append(mask, mask),
            "wrong type": mask.astype(np.int64),
            "no array": mask.tolist(),
        }
        return failed[self.way]  # type: ignore[return-value]
