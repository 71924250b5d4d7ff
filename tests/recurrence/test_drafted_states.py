"""States of recurrences behind steps with drafts are, to the bit, those of the right tokens computed one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from compiled_engine.config import RowState
from compiled_engine.recurrence.matrix_states import Drafted
from compiled_engine.recurrence.op import apply_rule, convolve, scan
from compiled_engine.recurrence.sequences import Sequences
from compiled_engine.recurrence.states import with_drafts, without_drafts

NUM_ROWS, LENGTH, MOST_DRAFTS = 6, 40, 3
HEADS, KEY, VALUE, CHANNELS, WIDTH = 4, 8, 12, 10, 4
Inputs = list[torch.Tensor]


@dataclass
class Request:
    """A request with the inputs of all its tokens, and how many of them are computed."""

    row: int
    inputs: Inputs
    prompt: int
    computed: int = 0
    outputs: list[torch.Tensor] = field(default_factory=list)


class Matrices:
    """Matrix states, with room for drafts or without."""

    num_decays = 1

    def __init__(self, num_drafts: int) -> None:
        state = RowState("layer.matrix_state", (HEADS, KEY, VALUE), "float32", num_decays=self.num_decays)
        states = with_drafts([state], num_drafts)
        self.state_SHkv, *rest = [
            torch.full((NUM_ROWS, *state.shape), 77, dtype=getattr(torch, state.dtype)) for state in states
        ]
        self.drafted = Drafted(*rest) if rest else None

    def kept(self, request: Request) -> tuple[int, torch.Tensor]:
        """The number of tokens that the request's state has, and the state."""
        length = request.computed if self.drafted is None else int(self.drafted.lengths_SHv[request.row, 0, 0])
        return length, self.state_SHkv[request.row].clone()


class Rule(Matrices):
    """A delta rule's states."""

    @staticmethod
    def inputs(generator: torch.Generator) -> Inputs:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(LENGTH, *shape, generator=generator)

        q, k, v, g, beta = normal(2, KEY), normal(2, KEY), normal(HEADS, VALUE), normal(HEADS), normal(HEADS)
        return [q, k, v, -g.abs(), beta.sigmoid()]

    def run(self, inputs: Inputs, sequences: Sequences) -> torch.Tensor:
        out_THv = torch.full_like(inputs[2], torch.nan)
        apply_rule(*inputs, True, self.state_SHkv, *(self.drafted or (None, None)), out_THv, *sequences)
        return out_THv


class ElementRule(Rule):
    """The states of a delta rule in which each element of a key decays by a number of its own."""

    num_decays = KEY

    @staticmethod
    def inputs(generator: torch.Generator) -> Inputs:
        q, k, v, _, beta = Rule.inputs(generator)
        return [q, k, v, -torch.randn(LENGTH, HEADS, KEY, generator=generator).exp(), beta]


class Space(Matrices):
    """The states of a state space model. Its steps are so large that softplus, which PyTorch rounds differently where a
    vector is not full, returns its argument."""

    A_H, D_H, dt_bias_H = -0.01 * torch.arange(1.0, HEADS + 1), torch.linspace(-1, 1, HEADS), torch.full((HEADS,), 30.0)

    @staticmethod
    def inputs(generator: torch.Generator) -> Inputs:
        shapes = (HEADS, VALUE), (HEADS,), (2, KEY), (2, KEY)
        return [torch.randn(LENGTH, *shape, generator=generator) for shape in shapes]

    def run(self, inputs: Inputs, sequences: Sequences) -> torch.Tensor:
        x_THv, dt_TH, B_TGk, C_TGk = inputs
        out_THv = torch.full_like(x_THv, torch.nan)
        operands = x_THv, dt_TH, self.A_H, B_TGk, C_TGk, self.D_H, self.dt_bias_H, 0.0, None
        scan(*operands, self.state_SHkv, *(self.drafted or (None, None)), out_THv, *sequences)
        return out_THv


class Convolution:
    """The same of a convolution. It has no activation, which PyTorch rounds differently where a vector is not full."""

    weight_DW = torch.randn(CHANNELS, WIDTH, generator=torch.Generator().manual_seed(5))

    def __init__(self, num_drafts: int) -> None:
        (state,) = with_drafts([RowState("layer.conv_state", (CHANNELS, WIDTH - 1), "float32")], num_drafts)
        self.state_SDN = torch.full((NUM_ROWS, *state.shape), torch.nan)

    @staticmethod
    def inputs(generator: torch.Generator) -> Inputs:
        return [torch.randn(LENGTH, CHANNELS, generator=generator)]

    def run(self, inputs: Inputs, sequences: Sequences) -> torch.Tensor:
        out_TD = torch.full_like(inputs[0], torch.nan)
        convolve(*inputs, self.weight_DW, None, "", None, None, self.state_SDN, out_TD, *sequences)
        return out_TD

    def kept(self, request: Request) -> tuple[int, torch.Tensor]:
        slots = torch.arange(max(0, request.computed - WIDTH + 1), request.computed) % self.state_SDN.shape[2]
        return request.computed, self.state_SDN[request.row][:, slots].clone()


def step(states: Any, shares: Sequence[tuple[Request, int, int, int, int]], draw: random.Random) -> None:
    """Compute a step. shares: requests, their tokens, drafts, right ones, and rows of drafts that do not exist."""
    rows, lens, seq_lens, parts = list[int](), list[int](), list[int](), list[Inputs]()
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    for request, count, drafts, right, missing in shares:
        computed = request.computed
        rows += [request.row] * (1 + drafts) + [draw.choice([-1, request.row]) for _ in range(missing)]
        lens += [count] + [1] * (drafts + missing)
        seq_lens += [computed + count + number for number in range(1 + drafts)] + [0] * missing
        wrong = [torch.randn(drafts - right + missing, *x.shape[1:], generator=generator) for x in request.inputs]
        parts.append(
            [torch.cat((x[computed : computed + count + right], y)) for x, y in zip(request.inputs, wrong, strict=True)]
        )
    packed = [torch.cat(columns) for columns in zip(*parts, strict=True)]
    starts_R1 = torch.tensor([0, *lens]).cumsum(0).int()
    host_3 = torch.tensor([0, max(lens), LENGTH]).int()
    output = states.run(packed, Sequences(torch.tensor(rows).int(), starts_R1, torch.tensor(seq_lens).int(), host_3))
    for (request, count, drafts, right, missing), out in zip(
        shares, output.split([part[0].shape[0] for part in parts]), strict=True
    ):
        request.outputs.append(out[: count + right])
        request.computed += count + right
        assert not out[count + drafts :].any()
        assert len(out) == count + drafts + missing


@pytest.mark.parametrize("make", [Rule, ElementRule, Space, Convolution])
@pytest.mark.parametrize("seed", range(4))
def test_wrong_drafts_leave_no_trace(make: Callable[[int], Any], seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    inputs = [make.inputs(generator) for _ in range(4)]  # type: ignore[attr-defined]
    prompts = [1, 5, 2, 17]
    alone, drafted = make(0), make(MOST_DRAFTS)
    expected: list[dict[int, torch.Tensor]] = []
    for row, (given, prompt) in enumerate(zip(inputs, prompts, strict=True)):
        request = Request(row, given, prompt)
        found: dict[int, torch.Tensor] = {}
        while request.computed < LENGTH:
            step(alone, [(request, 1 if request.computed else prompt, 0, 0, 0)], draw)
            length, state = alone.kept(request)
            found[length] = state
        expected.append({**found, 0: torch.cat(request.outputs)})
    requests = [
        Request(5 - row, given, prompt) for row, (given, prompt) in enumerate(zip(inputs, prompts, strict=True))
    ]
    while any(request.computed < LENGTH for request in requests):
        shares = []
        for request in draw.sample(requests, 4):
            if request.computed == LENGTH or draw.random() < 0.2:  # it pauses
                continue
            if not request.computed:
                shares.append((request, request.prompt, 0, 0, 0))
                continue
            drafts = min(draw.randint(0, MOST_DRAFTS), LENGTH - request.computed - 1)
            right = draw.choice([0, drafts, draw.randint(0, drafts)])
            shares.append((request, 1, drafts, right, draw.randint(0, MOST_DRAFTS - drafts)))
        shares.sort(key=lambda share: share[1] > 1)
        if not shares:
            continue
        step(drafted, shares, draw)
        for request, *_ in shares:
            length, state = drafted.kept(request)
            assert request.computed - MOST_DRAFTS <= length <= request.computed
            if length > request.prompt or length == request.computed:
                assert torch.equal(state, expected[5 - request.row][length])
    for request, states in zip(requests, expected, strict=True):
        assert torch.equal(torch.cat(request.outputs), states[0])


def test_room_for_drafts_comes_and_goes() -> None:
    states = [RowState("a.conv_state", (10, 3), "bfloat16"), RowState("a.matrix_state", (4, 8, 12), "float32")]
    kept = with_drafts(states, 3)
    assert [(each.name, each.shape, each.dtype) for each in kept] == [
        ("a.conv_state", (10, 6), "bfloat16"),
        ("a.matrix_state", (4, 8, 12), "float32"),
        ("a.matrix_drafts", (4, 7, 21), "float32"),
        ("a.matrix_lengths", (4, 12), "int32"),
    ]
    assert [each.name for each in kept if not each.in_snapshots] == ["a.matrix_drafts"]
    by_element = RowState("a.matrix_state", (4, 8, 12), "float32", num_decays=8)
    assert [each.shape for each in with_drafts([by_element], 3)] == [(4, 8, 12), (4, 7, 28), (4, 12)]
    assert without_drafts(kept, 3) == states == without_drafts(states, 0) == list(with_drafts(states, 0))
