"""Recurrences of batch-invariant engines: a token's bits do not depend on how steps divide its request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret

from compiled_engine.recurrence.convolution import convolve_reference
from compiled_engine.recurrence.convolution_triton import convolve_triton
from compiled_engine.recurrence.delta_rule import apply_rule_reference
from compiled_engine.recurrence.delta_rule_triton import apply_rule_triton
from compiled_engine.recurrence.matrix_states import Drafted
from compiled_engine.recurrence.sequences import Sequences
from compiled_engine.recurrence.state_space import scan_reference
from compiled_engine.recurrence.state_space_triton import scan_triton

NAN = float("nan")
REQUESTS, LENGTH, DRAFTS = 3, 14, 2
CHANNELS, WIDTH = 37, 4
GROUPS, HEADS, KEY, VALUE = 1, 2, 24, 40


class Part(NamedTuple):
    """Tokens of a request in a step: `count` from position `first` on, then drafts."""

    request: int
    first: int
    count: int
    drafts: int = 0


WHOLE = [[Part(request, 0, LENGTH)] for request in range(REQUESTS)]
DIVIDED = [
    [Part(0, 0, 5), Part(1, 0, 1), Part(2, 0, 11)],
    [Part(2, 11, 1), Part(0, 5, 1), Part(1, 1, 1)],
    [Part(1, 2, 9), Part(0, 6, 7)],
    [Part(0, 13, 1), Part(1, 11, 1), Part(2, 12, 1)],
    [Part(2, 13, 1), Part(1, 12, 2)],
]
# Of two drafts none, one or both are accepted; a rejected one is computed again.
DRAFTED = [
    [Part(0, 0, 3), Part(1, 0, 1), Part(2, 0, 1)],
    [Part(0, 3, 1, 2), Part(1, 1, 8), Part(2, 1, 1, 1)],
    [Part(0, 4, 1, 2), Part(1, 9, 1, 2), Part(2, 2, 1, 2)],
    [Part(0, 7, 1, 2), Part(1, 11, 1, 1), Part(2, 5, 1)],
    [Part(0, 9, 1, 2), Part(1, 13, 1), Part(2, 6, 1, 2)],
    [Part(0, 12, 1, 1), Part(2, 8, 1, 1)],
    [Part(0, 13, 1), Part(2, 10, 1, 2)],
    [Part(2, 13, 1)],
]


def sequences_of(step: Sequence[Part]) -> Sequences:
    rows, lens, seq_lens = list[int](), list[int](), list[int]()
    for part in step:
        rows += [2 * part.request + 1] * (1 + part.drafts)
        lens += [part.count] + [1] * part.drafts
        seq_lens += [part.first + part.count + number for number in range(1 + part.drafts)]
    num_rows = {1 + part.drafts for part in step}
    is_uniform = len(num_rows) == 1 and {*lens} == {1}
    host = (len(rows), num_rows.pop(), max(seq_lens)) if is_uniform else (lens.count(1), max(lens), max(seq_lens))
    starts = torch.tensor([0, *lens]).cumsum(0)
    return Sequences(*(torch.tensor(each).int() for each in (rows, starts.tolist(), seq_lens, host)))


class Recurrence(NamedTuple):
    """An op's operands for the tokens of all requests, [request, position, ...], and its states."""

    of_tokens: tuple[torch.Tensor, ...]
    others: tuple[Any, ...]
    states: Callable[[int], tuple[Any, ...]]  # of an engine with so many drafts
    like: int  # the operand whose shape the result has


def convolution() -> Recurrence:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(REQUESTS, LENGTH, CHANNELS, generator=generator)
    weight, bias = torch.randn(CHANNELS, WIDTH, generator=generator), torch.randn(CHANNELS, generator=generator)
    others = weight, bias, "silu", None, None

    def states(drafts: int) -> tuple[Any, ...]:
        return (torch.full((2 * REQUESTS, CHANNELS, WIDTH - 1 + drafts), NAN),)

    return Recurrence((x,), others, states, 0)


def matrix(drafts: int, decays: int = 1) -> tuple[Any, ...]:
    state = torch.full((2 * REQUESTS, HEADS, KEY, VALUE), NAN)
    if not drafts:
        return state, None
    updates = torch.full((2 * REQUESTS, HEADS, 2 * drafts + 1, KEY + VALUE + decays), NAN)
    return state, Drafted(updates, torch.full((2 * REQUESTS, HEADS, VALUE), 1 << 30, dtype=torch.int32))


def rule(by_element: bool = False) -> Recurrence:
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(REQUESTS, LENGTH, GROUPS, KEY, generator=generator) for _ in range(2))
    v = torch.randn(REQUESTS, LENGTH, HEADS, VALUE, generator=generator)
    decays = (KEY,) if by_element else ()
    g = -torch.rand(REQUESTS, LENGTH, HEADS, *decays, generator=generator)
    beta = torch.rand(REQUESTS, LENGTH, HEADS, generator=generator)
    return Recurrence((q, k, v, g, beta), (True,), lambda drafts: matrix(drafts, *decays), 2)


def space() -> Recurrence:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(REQUESTS, LENGTH, HEADS, VALUE, generator=generator)
    dt = torch.randn(REQUESTS, LENGTH, HEADS, generator=generator)
    b, c = (torch.randn(REQUESTS, LENGTH, GROUPS, KEY, generator=generator) for _ in range(2))
    a, d, bias = (torch.rand(HEADS, generator=generator) for _ in range(3))
    return Recurrence((x, dt, b, c), (-a, d, bias, 0.0, None), matrix, 0)


def arguments(made: Recurrence, values: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    if len(values) == 4:  # of the scan, in which A stands between step sizes and B
        (x, dt, b, c), (a, *others) = values, made.others
        return x, dt, a, b, c, *others
    return *values, *made.others


def results(run: Any, made: Recurrence, steps: Sequence[Sequence[Part]], drafts: int) -> tuple[torch.Tensor, ...]:
    """Return the results of all positions, and the states at the end of the requests' rows."""
    states = made.states(drafts)
    found = torch.full_like(made.of_tokens[made.like], NAN)
    for step in steps:
        places = [(p.request, p.first + n) for p in step for n in range(p.count + p.drafts)]
        requests, positions = torch.tensor(places).T
        values = [each[requests, positions] for each in made.of_tokens]
        out = torch.full_like(values[made.like], NAN)
        run(*arguments(made, values), *states, out, sequences_of(step), True)
        found[requests, positions] = out
    return found, states[0][1::2]


RUNS: dict[str, tuple[Recurrence, Any, Any]] = {
    "convolution": (convolution(), convolve_reference, convolve_triton),
    "delta rule": (rule(), apply_rule_reference, apply_rule_triton),
    "decays by element": (rule(by_element=True), apply_rule_reference, apply_rule_triton),
    "state space": (space(), scan_reference, scan_triton),
}


def check(name: str, run: Any, device: str = "cpu") -> None:
    made = RUNS[name][0]
    if device != "cpu":
        made = on_device(made, device)
    whole, state = results(run, made, WHOLE, 0)
    assert whole.isfinite().all()
    for steps, drafts in ((DIVIDED, 0), (WHOLE, DRAFTS), (DRAFTED, DRAFTS)):
        found, state_found = results(run, made, steps, drafts)
        assert torch.equal(found, whole), (name, drafts)
        if name != "convolution" or not drafts:  # whose slots are by position modulo their number
            assert torch.equal(state_found, state), (name, drafts)


def on_device(made: Recurrence, device: str) -> Recurrence:
    def moved(each: Any) -> Any:
        if isinstance(each, tuple):
            parts = map(moved, each)
            return type(each)(*parts) if hasattr(each, "_fields") else tuple(parts)
        return each.to(device) if isinstance(each, torch.Tensor) else each

    states = made.states
    return Recurrence(moved(made.of_tokens), moved(made.others), lambda drafts: moved(states(drafts)), made.like)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", RUNS)
def test_a_token_has_the_same_bits_however_steps_divide_its_request(name: str) -> None:
    check(name, RUNS[name][1])


def check_interpreted() -> None:
    for name in RUNS:
        check(name, RUNS[name][2])
    print("right")


@loops_to_a_loaded_bound
def test_kernels_in_the_interpreter() -> None:
    program = "from test_invariant_recurrences import check_interpreted; check_interpreted()"
    run = interpret(__file__, "-c", program)
    assert run.stdout == "right\n", run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("name", RUNS)
def test_kernels_on_a_gpu(name: str) -> None:
    def run(*operands: Any) -> None:
        *others, sequences, invariant = operands
        on_gpu = (*(each.to("cuda") for each in sequences[:3]), sequences.host_3)
        RUNS[name][2](*others, Sequences(*on_gpu), invariant)

    check(name, run, "cuda")
