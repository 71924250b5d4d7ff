"""Gumbel-max sampling on the CPU, with numpy: also what gumbel_triton.py must agree with."""

from __future__ import annotations

import numpy as np
import torch

from compiled_engine.sampling.noise import gumbel, splitmix64
from compiled_engine.sampling.row_chunks import row_chunks

# Noise is made for so many logits at a time: 0.25 MB of hashes, which stay in a core's cache.
MAX_NOISE_ELEMENTS = 1 << 15


def sample_tokens(
    logits_RV: torch.Tensor,
    inverse_temperature_R: torch.Tensor,
    seeds_R: torch.Tensor,
    positions_R: torch.Tensor,
    threshold_R: torch.Tensor,
) -> torch.Tensor:
    """Draw a token for each row from softmax(logits / temperature), over the logits not below the threshold.

    logits_RV: float32 [R, V]. inverse_temperature_R: float32 [R], 0 to take the most likely token instead.
    seeds_R, positions_R: int64 [R], the request's seed and the position that the token will have.
    threshold_R: float32 [R] in units of the logits; minus infinity keeps every token, as does NaN.
    Returns int64 [R]. The lowest token id wins a tie.
    """
    logits = logits_RV.numpy()
    inverse_temperature = inverse_temperature_R.numpy()
    threshold = threshold_R.numpy()
    keys = splitmix64(seeds_R.numpy().view(np.uint64), positions_R.numpy().view(np.uint64))

    token_ids = logits.argmax(axis=-1)
    random = inverse_temperature > 0
    filtered = threshold > -np.inf
    whole = np.flatnonzero(random & ~filtered)
    vocab_ids = np.arange(logits.shape[1], dtype=np.uint64)
    for chunk in row_chunks(len(whole), logits.shape[1], MAX_NOISE_ELEMENTS):
        rows = whole[chunk]
        scores = gumbel(splitmix64(keys[rows, None], vocab_ids))
        scores += logits[rows] * inverse_temperature[rows, None]
        token_ids[rows] = scores.argmax(axis=-1)

    rows = np.flatnonzero(random & filtered)
    if len(rows) > 0:
        kept = logits[rows] >= threshold[rows, None]
        segments, kept_ids = np.divmod(np.flatnonzero(kept), logits.shape[1])
        kept_rows = rows[segments]
        scores = gumbel(splitmix64(keys[kept_rows], kept_ids.view(np.uint64)))
        scores += logits[kept_rows, kept_ids] * inverse_temperature[kept_rows]
        token_ids[rows] = kept_ids[_segment_argmax(scores, segments, len(rows))]
    return torch.from_numpy(token_ids)


def _segment_argmax(scores: np.ndarray, segments: np.ndarray, num_segments: int) -> np.ndarray:
    """Where in `scores` [N] the largest of each segment stands; `segments` [N] ascends, none is missing."""
    lengths = np.bincount(segments, minlength=num_segments)
    starts = np.cumsum(lengths) - lengths
    padded = np.full((num_segments, lengths.max()), -np.inf, dtype=np.float32)
    padded[segments, np.arange(len(segments)) - starts[segments]] = scores
    return starts + padded.argmax(axis=-1)
