"""The noise: its hash, its range and accuracy, its statistics, and the Triton kernels that repeat it."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest

from compiled_engine.sampling.gumbel import GOLDEN_GAMMA, splitmix64
from compiled_engine.sampling.gumbel import gumbel as gumbel_noise

ALL_BITS = 2**64 - 1


def uint64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def noise_of(seeds: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    return gumbel_noise(splitmix64(splitmix64(seeds, positions), token_ids))


def test_hash_is_splitmix64() -> None:
    """Compares with published outputs for seed 1234567, and with the definition in Python's integers."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert splitmix64(uint64(1234567), np.arange(4, dtype=np.uint64)).tolist() == published

    def by_definition(seed: int, index: int) -> int:
        bits = (seed + (index + 1) * GOLDEN_GAMMA) & ALL_BITS
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & ALL_BITS
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & ALL_BITS
        return bits ^ (bits >> 31)

    for seed in (0, 1, 2**63, ALL_BITS):
        for index in (0, 1, 151_935, 2**32, ALL_BITS):
            assert int(splitmix64(uint64(seed), uint64(index))[0]) == by_definition(seed, index)


def test_extreme_bits_give_finite_noise() -> None:
    bits = uint64(0, 1, 2, 3, 2**32, 2**63 - 1, 2**63, ALL_BITS - 2**40, ALL_BITS - 1, ALL_BITS)
    noise = gumbel_noise(bits)
    assert noise.dtype == np.float32
    assert np.isfinite(noise).all()
    assert (np.diff(noise) <= 0).all()
    assert noise[0] == pytest.approx(63 * math.log(2), rel=1e-6)
    assert noise[-1] == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)


def test_noise_is_accurate_from_tail_to_tail() -> None:
    """Compares with 64-bit floats, for hashes of every magnitude from either end."""
    generator = np.random.default_rng(0)
    distance = 2.0 ** generator.uniform(1, 63, 200_000)
    near_zero = distance.astype(np.uint64)
    bits = np.concatenate([near_zero, ALL_BITS - near_zero, generator.integers(0, ALL_BITS, 200_000, np.uint64)])
    u = np.clip(((bits >> np.uint64(1)).astype(np.float64) * 2.0**-63), 2.0**-63, 1 - 2.0**-24)
    upper = u < 0.5
    expected = -np.log(-np.log1p(-u))
    np.testing.assert_allclose(gumbel_noise(bits)[upper], expected[upper], rtol=1e-6, atol=1e-6)
    # Near 1 a float32 has 24 bits, and the noise, which is then least, the accuracy that these allow.
    assert (np.diff(gumbel_noise(np.sort(bits))) <= 1e-6).all()
    exact = (u < 1 - 2.0**-10) & ~upper
    np.testing.assert_allclose(gumbel_noise(bits)[exact], expected[exact], atol=1e-4)


def test_noise_follows_the_gumbel_distribution() -> None:
    """Kolmogorov-Smirnov distance of a million, and how many lie in the upper tail."""
    noise = np.sort(
        noise_of(uint64(5), np.arange(1000, dtype=np.uint64)[:, None], np.arange(1000, dtype=np.uint64)), axis=None
    )
    expected = np.exp(-np.exp(-noise.astype(np.float64)))
    distance = np.abs(expected - np.arange(len(noise)) / len(noise)).max()
    assert distance < 1.95 / math.sqrt(len(noise))  # the 0.1 % point
    for probability in (1e-3, 1e-4):
        above = int((noise > -math.log(-math.log1p(-probability))).sum())
        assert abs(above - 1e6 * probability) < 5 * math.sqrt(1e6 * probability)


@pytest.mark.parametrize("neighbour", ["token", "position", "seed"])
@pytest.mark.parametrize("start", [0, 2**32 - 100, 2**63])
def test_neighbours_are_uncorrelated_and_never_equal(neighbour: str, start: int) -> None:
    steps = np.arange(301, dtype=np.uint64)
    near, other = steps[:, None] + np.uint64(start), steps[None, :]
    bits = {
        "token": lambda: splitmix64(splitmix64(uint64(3), other), near),
        "position": lambda: splitmix64(splitmix64(uint64(3), near), other),
        "seed": lambda: splitmix64(splitmix64(near, uint64(7)), other),
    }[neighbour]()
    assert len(np.unique(bits)) == bits.size
    noise = gumbel_noise(bits)
    for lag in (1, 2, 16):
        correlation = np.corrcoef(noise[lag:].ravel(), noise[:-lag].ravel())[0, 1]
        assert abs(correlation) < 5 / math.sqrt(noise[lag:].size)


def test_noise_is_a_pure_function_of_its_arguments() -> None:
    """One at a time or in arrays of any shape, results are bit-identical."""
    positions, token_ids = np.arange(7, dtype=np.uint64), np.arange(500, dtype=np.uint64)
    together = noise_of(uint64(11), positions[:, None], token_ids)
    for row, position in enumerate(positions):
        for part in (slice(0, 1), slice(3, 20), slice(450, 500)):
            alone = noise_of(uint64(11), np.array([position]), token_ids[part])
            np.testing.assert_array_equal(alone, together[row, part])


INTERPRETED = """
import numpy as np
import torch
import triton
import triton.language as tl
from compiled_engine.sampling import gumbel as noise, gumbel_triton

@triton.jit
def hash_kernel(seed_ptr, index_ptr, bits_ptr, noise_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    seed, index = tl.load(seed_ptr + at).to(tl.uint64), tl.load(index_ptr + at).to(tl.uint64)
    bits = gumbel_triton.splitmix64(seed, index)
    tl.store(bits_ptr + at, bits.to(tl.int64))
    tl.store(noise_ptr + at, gumbel_triton.gumbel(bits))

generator = torch.Generator().manual_seed(0)
size = 1 << 14
seed = torch.randint(-2**63, 2**63 - 1, (size,), generator=generator)
index = torch.randint(-2**63, 2**63 - 1, (size,), generator=generator)
index[: size // 2] = torch.arange(size // 2)
bits, noise_S = torch.empty_like(seed), torch.empty(size)
hash_kernel[(1,)](seed, index, bits, noise_S, SIZE=size)
expected = noise.splitmix64(seed.numpy().view(np.uint64), index.numpy().view(np.uint64))
np.testing.assert_array_equal(bits.numpy().view(np.uint64), expected)
np.testing.assert_allclose(noise_S.numpy(), noise.gumbel(expected), rtol=1e-6, atol=1e-6)

print("equal")
"""


def test_triton_makes_the_same_noise() -> None:
    """In its interpreter: hashes to the bit, noise to 1e-6. What is chosen by it: test_sampling_kernels.py."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False
    )
    assert result.stdout == "equal\n", result.stderr
