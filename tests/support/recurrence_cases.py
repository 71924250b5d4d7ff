"""Random steps of recurrences, with every state poisoned that must not be read; kernels against plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from compiled_engine.recurrence.convolution import convolve_reference
from compiled_engine.recurrence.convolution_triton import convolve_triton
from compiled_engine.recurrence.delta_rule import apply_rule_reference
from compiled_engine.recurrence.delta_rule_triton import apply_rule_triton
from compiled_engine.recurrence.sequences import Sequences

NUM_ROWS = 7
NAN = float("nan")
# Tokens of each request in the step, and those before it; None: a row of padding.
STEPS: tuple[tuple[tuple[int, int | None], ...], ...] = (
    ((1, 4), (1, 0), (1, None)),
    ((1, 9), (5, 0), (2, 1), (33, 7), (3, None)),
    ((2, 0), (1, 3), (0, None), (0, None)),
    ((21, 0),),
    ((1, 0), (1, 1), (1, 2), (4, 30), (4, None), (0, None)),
)


def sequences_of(step: Sequence[tuple[int, int | None]], generator: torch.Generator) -> Sequences:
    """The step's requests, each in a random row."""
    rows = torch.randperm(NUM_ROWS, generator=generator)[: len(step)].tolist()
    lens = [length for length, _ in step]
    return Sequences(
        torch.tensor([-1 if before is None else row for row, (_, before) in zip(rows, step, strict=True)]).int(),
        torch.tensor([0, *lens]).cumsum(0).int(),
        torch.tensor([0 if before is None else length + before for length, before in step]).int(),
    )


def poisoned(state_S: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """The states with NaN in each row whose state the step must not read."""
    lens_R = sequences.query_start_loc_R1.diff()
    read_R = (sequences.rows_R >= 0) & (sequences.seq_lens_R > lens_R)
    poisoned_S = torch.full_like(state_S, NAN)
    read = sequences.rows_R[read_R].long()
    poisoned_S[read] = state_S[read]
    return poisoned_S


def convolution(
    step: Sequence[tuple[int, int | None]], seed: int, dtype: torch.dtype = torch.float32, channels: int = 70
) -> tuple[list[Any], Sequences]:
    """Arguments of `convolve` before the sequences, and these; x, and what it is multiplied with, if it is, are columns
    of wider tensors."""
    generator = torch.Generator().manual_seed(seed)
    sequences, width = sequences_of(step, generator), 3 + seed % 2
    num_tokens = int(sequences.query_start_loc_R1[-1])
    x_TD = torch.randn(num_tokens, channels + 9, generator=generator).to(dtype)[:, 4 : 4 + channels]
    weight_DW = torch.randn(channels, width, generator=generator).to(dtype)
    bias_D = torch.randn(channels, generator=generator).to(dtype) if seed % 3 else None
    state_SDL = poisoned(torch.randn(NUM_ROWS, channels, width - 1, generator=generator).to(dtype), sequences)
    out_TD = torch.full((num_tokens, channels), NAN, dtype=dtype)
    factor_TD, _, gate_TD = torch.randn(num_tokens, 3 * channels, generator=generator).to(dtype).chunk(3, 1)
    products = factor_TD if seed % 4 in (1, 2) else None, gate_TD if seed % 4 > 1 else None
    return [x_TD, weight_DW, bias_D, "silu" if seed % 2 else "", *products, state_SDL, out_TD], sequences


def rule(
    step: Sequence[tuple[int, int | None]],
    seed: int,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, int] = (24, 40),
) -> tuple[list[Any], Sequences]:
    """Arguments of `apply_rule` before the sequences, and these; queries, keys and values are columns of one tensor.

    Keys of neighbouring tokens are alike, as those of repeated text are. sizes: of a key and of a value.
    """
    generator = torch.Generator().manual_seed(seed)
    sequences = sequences_of(step, generator)
    num_tokens, (key, value), groups = int(sequences.query_start_loc_R1[-1]), sizes, 1 + seed % 2
    heads = 2 * groups
    mixed_TD = torch.randn(num_tokens, 2 * groups * key + heads * value, generator=generator)
    mixed_TD[:, groups * key : 2 * groups * key] *= 0.2
    mixed_TD[:, groups * key : 2 * groups * key] += 1.0
    q_TD, k_TD, v_TD = mixed_TD.to(dtype).split([groups * key, groups * key, heads * value], -1)
    g_TH = -torch.rand(num_tokens, heads, generator=generator)
    beta_TH = torch.rand(num_tokens, heads, generator=generator).to(dtype)
    state_SHkv = poisoned(torch.randn(NUM_ROWS, heads, key, value, generator=generator), sequences)
    out_THv = torch.full((num_tokens, heads, value), NAN, dtype=dtype)
    operands = q_TD.unflatten(1, (groups, key)), k_TD.unflatten(1, (groups, key)), v_TD.unflatten(1, (heads, value))
    return [*operands, g_TH, beta_TH, True, state_SHkv, out_THv], sequences


def check(
    kernel: Callable[..., None],
    reference: Callable[..., None],
    arguments: Sequence[Any],
    sequences: Sequences,
    device: torch.device,
    tolerance: float,
) -> None:
    """Raise AssertionError unless both leave the same results and states; what nothing wrote is still NaN."""
    expected = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
    reference(*expected, sequences)
    found = [x.to(device, copy=True) if isinstance(x, torch.Tensor) else x for x in arguments]
    kernel(*found, Sequences(*(x.to(device) for x in sequences)))
    assert not expected[-1].isnan().any()
    for one, other in zip(found[-2:], expected[-2:], strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=tolerance, atol=tolerance, equal_nan=True)


def check_all(device: torch.device, repeats: int) -> None:
    """Check both kernels on every step in fp32."""
    for seed, step in enumerate(STEPS * repeats):
        check(convolve_triton, convolve_reference, *convolution(step, seed), device, 2e-5)
        check(apply_rule_triton, apply_rule_reference, *rule(step, seed), device, 1e-4)


def main() -> None:
    check_all(torch.device("cpu"), 1)
    print("equal")
