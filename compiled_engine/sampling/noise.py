"""Stateless Gumbel noise: a pure function of (seed, position, token id).

So a request's noise does not depend on its row, its batch, padding, or on how often it was preempted.

The hash is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA
2014): its i-th output is a function of its seed and i alone. It is used twice: the request's seed gives a
64-bit key for each position, and the key gives 64 bits for each token id.

Gumbel noise is -log(e), e = -log(1 - u), with u uniform in (0, 1): the largest of logits plus such noise is a
draw from their softmax (the Gumbel-max trick). The largest over a vocabulary has a small e, hence a small u.
So u keeps 24 significant bits however small it is, down to 2**-63: the upper tail comes in no visible steps.
Near 1, where noise is least, u ends at 1 - 2**-24. All noise lies in [-2.82, 43.67].
"""

from __future__ import annotations

import numpy as np

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
SMALLEST_UNIFORM = 2.0**-63
LARGEST_UNIFORM = 1.0 - 2.0**-24


def splitmix64(seed: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Output `index` (from 0) of SplitMix64 seeded with `seed`: uint64, as both are; they are broadcast."""
    bits = (index + np.uint64(1)) * np.uint64(GOLDEN_GAMMA) + seed
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(MULTIPLIER_1)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(MULTIPLIER_2)
    bits ^= bits >> np.uint64(31)
    return bits


def gumbel(bits: np.ndarray) -> np.ndarray:
    """Gumbel noise, float32, from the upper 63 of 64 random bits (uint64)."""
    u = (bits >> np.uint64(1)).view(np.int64).astype(np.float32)
    u *= np.float32(SMALLEST_UNIFORM)
    np.maximum(u, np.float32(SMALLEST_UNIFORM), out=u)
    np.minimum(u, np.float32(LARGEST_UNIFORM), out=u)
    # -log(1 - u), exact where u is small: what 1 - u loses by rounding is added back.
    rest = np.float32(1) - u
    u -= np.float32(1) - rest
    u -= np.log(rest)
    return -np.log(u)
