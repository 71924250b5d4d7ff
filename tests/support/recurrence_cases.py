"""Random steps of recurrences, with every state poisoned that must not be read; kernels against plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from compiled_engine.recurrence.convolution import convolve_reference
from compiled_engine.recurrence.convolution_triton import convolve_triton
from compiled_engine.recurrence.delta_rule import apply_rule_reference
from compiled_engine.recurrence.delta_rule_triton import apply_rule_triton
from compiled_engine.recurrence.matrix_states import Drafted
from compiled_engine.recurrence.sequences import Sequences
from compiled_engine.recurrence.state_space import scan_reference
from compiled_engine.recurrence.state_space_triton import scan_triton

NUM_ROWS = 7
NAN = float("nan")


class Of(NamedTuple):
    """A request's tokens in a step, and what precedes them."""

    length: int  # tokens in the step
    before: int | None  # earlier tokens; None: a row of padding
    drafts: int = 0
    missing: int = 0  # rows for drafts that do not exist
    right: int = 0  # drafts of the previous step that were right


STEPS: tuple[tuple[Of, ...], ...] = (
    (Of(1, 4), Of(1, 0), Of(1, None)),
    (Of(1, 9), Of(5, 0), Of(2, 1), Of(33, 7), Of(3, None)),
    (Of(2, 0), Of(1, 3), Of(0, None), Of(0, None)),
    (Of(21, 0),),
    (Of(1, 0), Of(1, 1), Of(1, 2), Of(4, 30), Of(4, None), Of(0, None)),
)
MOST_DRAFTS = 3
DRAFTED_STEPS: tuple[tuple[Of, ...], ...] = (
    (Of(1, 4, 3, 0, 2), Of(1, 1, 0, 3), Of(1, 30, 2, 1, 3), Of(1, 8, 1, 2), Of(1, None, 0, 3)),
    (Of(1, 4, 1, 0, 3), Of(1, 2, 1, 0, 1), Of(1, 6, 0, 1)),
    (Of(4, 2), Of(1, 6, 0, 0, 2), Of(0, None), Of(0, None), Of(0, None)),
    (Of(1, 7, 3, 0, 3), Of(1, 0), Of(1, 5, 2, 1, 1), Of(5, 0), Of(2, 6), Of(33, 7), Of(3, None)),
    (Of(1, 2, 1, 0, 1), Of(1, 9, 0, 1), Of(1, None), Of(1, None)),
    (Of(1, 3, 0, 0, 2), Of(2, 0), Of(1, 8)),
)


def sequences_of(step: Sequence[Of], generator: torch.Generator) -> tuple[Sequences, dict[int, Of]]:
    """Return the step's requests, each in a random row, and the request of each row."""
    rows, lens, seq_lens = list[int](), list[int](), list[int]()
    at = torch.randperm(NUM_ROWS, generator=generator)[: len(step)].tolist()
    for row, request in zip(at, step, strict=True):
        before = request.before
        rows += [-1 if before is None else row] * (1 + request.drafts + request.missing)
        lens += [request.length] + [1] * (request.drafts + request.missing)
        seq_lens += [0 if before is None else before + request.length + number for number in range(1 + request.drafts)]
        seq_lens += [0] * request.missing
    num_rows = {1 + request.drafts + request.missing for request in step}
    is_uniform = len(num_rows) == 1 and {*lens} == {1}
    host = (len(rows), num_rows.pop(), max(seq_lens)) if is_uniform else (lens.count(1), max(lens), max(seq_lens))
    sequences = Sequences(
        torch.tensor(rows).int(),
        torch.tensor([0, *lens]).cumsum(0).int(),
        torch.tensor(seq_lens).int(),
        torch.tensor(host).int(),
    )
    return sequences, {row: request for row, request in zip(at, step, strict=True) if request.before}


def last_inputs(state_SDN: torch.Tensor, count: int, requests: dict[int, Of]) -> torch.Tensor:
    """Return a convolution's states with NaN in all slots except those of the requests' last `count` positions."""
    poisoned_SDN = torch.full_like(state_SDN, NAN)
    for row, request in requests.items():
        assert request.before is not None
        slots = torch.arange(max(0, request.before - count), request.before) % state_SDN.shape[2]
        poisoned_SDN[row, :, slots] = state_SDN[row, :, slots]
    return poisoned_SDN


def convolution(
    step: Sequence[Of], seed: int, dtype: torch.dtype = torch.float32, channels: int = 70, drafts: int = 0
) -> tuple[list[Any], Sequences]:
    """Return the arguments of `convolve` before the sequences, and the sequences.

    x, and what it may be multiplied with, are columns of wider tensors. drafts: the most drafts of a request.
    """
    generator = torch.Generator().manual_seed(seed)
    (sequences, requests), width = sequences_of(step, generator), 3 + seed % 2
    num_tokens = int(sequences.query_start_loc_R1[-1])
    x_TD = torch.randn(num_tokens, channels + 9, generator=generator).to(dtype)[:, 4 : 4 + channels]
    weight_DW = torch.randn(channels, width, generator=generator).to(dtype)
    bias_D = torch.randn(channels, generator=generator).to(dtype) if seed % 3 else None
    state_SDN = torch.randn(NUM_ROWS, channels, width - 1 + drafts, generator=generator).to(dtype)
    state_SDN = last_inputs(state_SDN, width - 1, requests)
    out_TD = torch.full((num_tokens, channels), NAN, dtype=dtype)
    factor_TD, _, gate_TD = torch.randn(num_tokens, 3 * channels, generator=generator).to(dtype).chunk(3, 1)
    products = factor_TD if seed % 4 in (1, 2) else None, gate_TD if seed % 4 > 1 else None
    return [x_TD, weight_DW, bias_D, "silu" if seed % 2 else "", *products, state_SDN, out_TD], sequences


def matrix_states(
    requests: dict[int, Of], sizes: tuple[int, int, int], drafts: int, generator: torch.Generator, decays: int = 1
) -> tuple[torch.Tensor, Drafted | None]:
    """Return random states of requests with earlier tokens, and of right drafts; all else is poisoned.

    sizes: heads, elements of a key and of a value. drafts: the most drafts of a request; 0: no room for any. decays:
    numbers by which a token decays a state.
    """
    heads, key, value = sizes
    state_SHkv = torch.full((NUM_ROWS, heads, key, value), NAN)
    state_SHkv[[*requests]] = torch.randn(len(requests), heads, key, value, generator=generator)
    if not drafts:
        return state_SHkv, None
    drafted = Drafted(
        torch.full((NUM_ROWS, heads, 2 * drafts + 1, key + value + decays), NAN),
        torch.full((NUM_ROWS, heads, value), 1 << 30, dtype=torch.int32),
    )
    for row, request in requests.items():
        assert request.before is not None
        drafted.lengths_SHv[row] = length = request.before - request.right
        slots = torch.arange(length, request.before) % (2 * drafts + 1)
        updates = torch.randn(heads, request.right, key + value + decays, generator=generator)
        updates[..., -decays:] = -updates[..., -decays:].abs()
        drafted.drafts_SHNw[row, :, slots] = updates
    return state_SHkv, drafted


def rule(
    step: Sequence[Of],
    seed: int,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, int] = (24, 40),
    drafts: int = 0,
    by_element: bool = False,
) -> tuple[list[Any], Sequences]:
    """Return the arguments of `apply_rule` before the sequences, and the sequences.

    Queries, keys and values are columns of one tensor, NaN in tokens of padding. Keys of neighbouring tokens are alike,
    as in repeated text.
    sizes: of a key and of a value. drafts: the most drafts of a request. by_element: each element of a key decays by a
    number of its own, some hardly, some to nothing at once.
    """
    generator = torch.Generator().manual_seed(seed)
    (sequences, requests), (key, value), groups = sequences_of(step, generator), sizes, 1 + seed % 2
    num_tokens, heads = int(sequences.query_start_loc_R1[-1]), 2 * groups
    mixed_TD = torch.randn(num_tokens, 2 * groups * key + heads * value, generator=generator)
    mixed_TD[:, groups * key : 2 * groups * key] *= 0.2
    mixed_TD[:, groups * key : 2 * groups * key] += 1.0
    q_TD, k_TD, v_TD = mixed_TD.to(dtype).split([groups * key, groups * key, heads * value], -1)
    g_TH = -torch.rand(num_tokens, heads, *([key] if by_element else []), generator=generator)
    if by_element:
        g_TH = -torch.exp(-16 * g_TH - 10)
    beta_TH = torch.rand(num_tokens, heads, generator=generator).to(dtype)
    is_padding_R = (sequences.rows_R < 0) | (sequences.seq_lens_R == 0)
    is_padding_T = is_padding_R.repeat_interleave(sequences.lens)
    for each in (q_TD, k_TD, v_TD, g_TH, beta_TH):
        each[is_padding_T] = NAN
    decays = key if by_element else 1
    state_SHkv, drafted = matrix_states(requests, (heads, key, value), drafts, generator, decays)
    out_THv = torch.full((num_tokens, heads, value), NAN, dtype=dtype)
    operands = q_TD.unflatten(1, (groups, key)), k_TD.unflatten(1, (groups, key)), v_TD.unflatten(1, (heads, value))
    return [*operands, g_TH, beta_TH, True, state_SHkv, drafted, out_THv], sequences


def space(
    step: Sequence[Of],
    seed: int,
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, int] = (24, 40),
    drafts: int = 0,
) -> tuple[list[Any], Sequences]:
    """Return the arguments of `scan` before the sequences, and the sequences.

    x, B, C and step sizes are columns of wider tensors. Step sizes are tiny to large, and in some cases limited. sizes:
    of a state for each element, and of a head.
    """
    generator = torch.Generator().manual_seed(seed)
    (sequences, requests), (key, value), groups = sequences_of(step, generator), sizes, 1 + seed % 2
    num_tokens, heads = int(sequences.query_start_loc_R1[-1]), 2 * groups
    mixed_TD = torch.randn(num_tokens, heads * value + 2 * groups * key + heads, generator=generator).to(dtype)
    x_TD, B_TD, C_TD, dt_TH = mixed_TD.split([heads * value, groups * key, groups * key, heads], -1)
    A_H = -torch.rand(heads, generator=generator) - 0.1
    D_H = torch.randn(heads, generator=generator).to(dtype)
    dt_bias_H = torch.linspace(-18, 22, heads).to(dtype)
    limits = (0.0, None) if seed % 3 else (1e-3, 2.0)
    states = matrix_states(requests, (heads, key, value), drafts, generator)
    out_THv = torch.full((num_tokens, heads, value), NAN, dtype=dtype)
    B_TGk, C_TGk = (each.unflatten(1, (groups, key)) for each in (B_TD, C_TD))
    operands = x_TD.unflatten(1, (heads, value)), dt_TH, A_H, B_TGk, C_TGk, D_H, dt_bias_H
    return [*operands, *limits, *states, out_THv], sequences


def copied(arguments: Sequence[Any], device: torch.device) -> list[Any]:
    def copy(given: Any) -> Any:
        if isinstance(given, Drafted):
            return Drafted(*map(copy, given))
        return given.to(device, copy=True) if isinstance(given, torch.Tensor) else given

    return [*map(copy, arguments)]


def check(
    kernel: Callable[..., None],
    reference: Callable[..., None],
    arguments: Sequence[Any],
    sequences: Sequences,
    device: torch.device,
    tolerance: float,
) -> None:
    """Assert that kernel and reference give the same results and states, and that unwritten memory is still NaN."""
    expected, found = copied(arguments, torch.device("cpu")), copied(arguments, device)
    reference(*expected, sequences)
    kernel(*found, Sequences(*(x.to(device) for x in sequences.on_device), sequences.host_3))
    assert not expected[-1].isnan().any()
    for one, other in zip(found, expected, strict=True):
        if not isinstance(one, Drafted | torch.Tensor):
            continue
        pairs = zip(one, other, strict=True) if isinstance(one, Drafted) else [(one, other)]
        for ours, theirs in pairs:
            torch.testing.assert_close(ours.cpu(), theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


def check_all(device: torch.device, repeats: int) -> None:
    """Check the kernels on every step in fp32."""
    for drafts, steps in ((0, STEPS), (MOST_DRAFTS, DRAFTED_STEPS)):
        for seed, step in enumerate(steps * repeats):
            check(convolve_triton, convolve_reference, *convolution(step, seed, drafts=drafts), device, 2e-5)
            for by_element in (False, True):
                case = rule(step, seed, drafts=drafts, by_element=by_element)
                check(apply_rule_triton, apply_rule_reference, *case, device, 1e-4)
            check(scan_triton, scan_reference, *space(step, seed, drafts=drafts), device, 1e-4)


def main() -> None:
    check_all(torch.device("cpu"), 1)
    print("equal")
