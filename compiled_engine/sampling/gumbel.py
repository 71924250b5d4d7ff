"""Gumbel-max sampling on the CPU, in numpy and as a C++ loop; gumbel_triton.py must agree with it.

Noise is a pure function of seed, position and token id. So a request's noise does not depend on its row, its batch,
padding, or preemptions.

The hash is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), whose
i-th output is a function of its seed and i alone. It is used twice: the request's seed gives a 64-bit key for each
position, and the key gives 64 bits for each token id.

Gumbel noise is -log(e), e = -log(1 - u), with u uniform in (0, 1): the largest of logits plus noise is a draw from
their softmax (the Gumbel-max trick). The largest noise of a vocabulary comes from a small u. So u keeps 24 significant
bits down to 2**-63, which makes the upper tail smooth. Near 1, where noise is least, u ends at 1 - 2**-24. All noise
lies in [-2.82, 43.67].
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compiled_engine.kernels.cpp_library import CannotCompile, load_library
from compiled_engine.sampling.ranks import Best, row_chunks
from compiled_engine.sampling.sampled_tokens import NOT_A_NUMBER, NOTHING_ALLOWED

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
SMALLEST_UNIFORM = 2.0**-63
LARGEST_UNIFORM = 1.0 - 2.0**-24
# Noise is computed for this many logits at a time: 0.25 MB of hashes fit into a core's cache.
MAX_NOISE_ELEMENTS = 1 << 15
SOURCE = Path(__file__).with_name("gumbel_cpp.cpp")


def splitmix64(seed: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return output `index` (from 0) of SplitMix64 seeded with `seed`, uint64. Both arguments are uint64, broadcast."""
    bits = (index + np.uint64(1)) * np.uint64(GOLDEN_GAMMA) + seed
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(MULTIPLIER_1)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(MULTIPLIER_2)
    bits ^= bits >> np.uint64(31)
    return bits


def gumbel(bits: np.ndarray) -> np.ndarray:
    """Return Gumbel noise, float32, made of the upper 63 of 64 random bits (uint64)."""
    u = (bits >> np.uint64(1)).view(np.int64).astype(np.float32)
    u *= np.float32(SMALLEST_UNIFORM)
    np.maximum(u, np.float32(SMALLEST_UNIFORM), out=u)
    np.minimum(u, np.float32(LARGEST_UNIFORM), out=u)
    # -log(1 - u), exact for small u: the rounding error of 1 - u is added back.
    rest = np.float32(1) - u
    u -= np.float32(1) - rest
    u -= np.log(rest)
    return -np.log(u)


def sample(
    logits_SV: torch.Tensor,
    row_index_S: torch.Tensor,
    positions_S: torch.Tensor,
    inverse_temperature_N: torch.Tensor,
    seeds_N: torch.Tensor,
    threshold_S: torch.Tensor | None,
    token_ids_S: torch.Tensor,
    best: Best | None = None,
) -> None:
    """Draw a token for each row from softmax(logits / temperature), over the tokens at or above the row's threshold.

    logits_SV: float32 [S, V]. row_index_S: int32 [S], index of the row's parameters in the tensors [N]; -1 is padding,
    which gets token 0. positions_S: int64 [S], the positions of the new tokens. inverse_temperature_N: float32 [N], 0
    for greedy. seeds_N: int64 [N]. threshold_S: float32 [S] in units of the logits; minus infinity, NaN and None keep
    every token. token_ids_S: int64 [S], output. best: given on a rank that has only some columns of a divided
    vocabulary; receives the scores of the drawn tokens.

    The lowest token id wins a tie. If a logit that may be drawn is NaN, or all are minus infinity, the result is an
    error code of sampled_tokens.py.
    """
    row_index = row_index_S.numpy()
    present = np.flatnonzero(row_index >= 0)
    token_ids = token_ids_S.numpy()
    token_ids[:] = 0
    if best is not None:
        best.scores_S.fill_(-torch.inf)
    if len(present) == 0:
        return
    state_rows = row_index[present]
    whole_batch = len(present) == len(row_index)
    logits = logits_SV.numpy() if whole_batch else logits_SV.numpy()[present]
    positions = positions_S.numpy()[present].view(np.uint64)
    inverse_temperature = inverse_temperature_N.numpy()[state_rows]
    keys = splitmix64(seeds_N.numpy()[state_rows].view(np.uint64), positions)
    threshold = None if threshold_S is None else threshold_S.numpy()[present]
    first_token = 0 if best is None else best.first_token
    token_ids[present], scores = _choose(logits, inverse_temperature, keys, threshold, first_token)
    if best is not None:
        best.scores_S.numpy()[present] = scores


def _choose(
    logits: np.ndarray,
    inverse_temperature: np.ndarray,
    keys: np.ndarray,
    threshold: np.ndarray | None,
    first_token: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Choose a token for each row of logits [R, V]. Returns (token ids or error codes, their scores), [R] each.

    keys: uint64 [R], the key of each row's noise. first_token: token id of the first column.
    """
    token_ids = logits.argmax(axis=-1)  # NaN counts as the largest
    best_scores = np.take_along_axis(logits, token_ids[:, None], axis=1)[:, 0]
    random = inverse_temperature > 0
    filtered = np.zeros_like(random) if threshold is None else threshold > -np.inf
    whole = np.flatnonzero(random & ~filtered)
    vocab_ids = np.arange(first_token, first_token + logits.shape[1], dtype=np.uint64)
    for chunk in row_chunks(len(whole), logits.shape[1], MAX_NOISE_ELEMENTS):
        rows = whole[chunk]
        scores = gumbel(splitmix64(keys[rows, None], vocab_ids))
        with np.errstate(over="ignore"):  # to infinity, as on the device
            scores += logits[rows] * inverse_temperature[rows, None]
        token_ids[rows] = best = scores.argmax(axis=-1)
        best_scores[rows] = scores[np.arange(len(best)), best]

    rows = np.flatnonzero(random & filtered)
    if threshold is not None and len(rows) > 0:
        kept = ~(logits[rows] < threshold[rows, None])
        segments, kept_ids = np.divmod(np.flatnonzero(kept), logits.shape[1])
        kept_rows = rows[segments]
        scores = gumbel(splitmix64(keys[kept_rows], (kept_ids + first_token).view(np.uint64)))
        with np.errstate(over="ignore"):
            scores += logits[kept_rows, kept_ids] * inverse_temperature[kept_rows]
        best = _segment_argmax(scores, segments, len(rows))
        token_ids[rows], best_scores[rows] = kept_ids[best], scores[best]
    token_ids += first_token
    token_ids[np.isnan(best_scores)] = NOT_A_NUMBER
    token_ids[best_scores == -np.inf] = NOTHING_ALLOWED
    return token_ids, best_scores


def _segment_argmax(scores: np.ndarray, segments: np.ndarray, num_segments: int) -> np.ndarray:
    """Return the index in `scores` [N] of each segment's largest score, [num_segments].

    segments: [N], the segment of each score, in ascending order; no segment is empty.
    """
    lengths = np.bincount(segments, minlength=num_segments)
    starts = np.cumsum(lengths) - lengths
    padded = np.full((num_segments, lengths.max()), -np.inf, dtype=np.float32)
    padded[segments, np.arange(len(segments)) - starts[segments]] = scores
    return starts + padded.argmax(axis=-1)


def fastest_sample() -> Callable[..., None]:
    """Return the C++ implementation of `sample`, or numpy's if the C++ code cannot be compiled."""
    try:
        _kernel()
    except CannotCompile:
        return sample
    return sample_in_cpp


def sample_in_cpp(
    logits_SV: torch.Tensor,
    row_index_S: torch.Tensor,
    positions_S: torch.Tensor,
    inverse_temperature_N: torch.Tensor,
    seeds_N: torch.Tensor,
    threshold_S: torch.Tensor | None,
    token_ids_S: torch.Tensor,
    best: Best | None = None,
) -> None:
    """Draw the same tokens as `sample`, except where scores differ only by the rounding of a logarithm."""
    num_samples, vocab_size = logits_SV.shape
    _kernel()(
        logits_SV.data_ptr(),
        logits_SV.stride(0),
        row_index_S.data_ptr(),
        positions_S.data_ptr(),
        inverse_temperature_N.data_ptr(),
        seeds_N.data_ptr(),
        None if threshold_S is None else threshold_S.data_ptr(),
        token_ids_S.data_ptr(),
        None if best is None else best.scores_S.data_ptr(),
        0 if best is None else best.first_token,
        num_samples,
        vocab_size,
        torch.get_num_threads(),
    )


@cache
def _kernel() -> Any:
    kernel = load_library(SOURCE).sample
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    kernel.argtypes = [pointer, integer, *[pointer] * 7, *[integer] * 4]
    kernel.restype = None
    return kernel
