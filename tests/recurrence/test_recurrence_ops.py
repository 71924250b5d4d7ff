"""Recurrences over packed sequences equal transformers' functions, and the kernels both."""

from __future__ import annotations

import math

import pytest
import torch
from interpreter import loops_to_a_loaded_bound
from interpreting_process import interpret
from recurrence_cases import NAN, check_all, convolution
from recurrence_cases import STEPS as STEPS_OF_CASES
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from compiled_engine.recurrence.op import apply_rule, convolve, scan
from compiled_engine.recurrence.sequences import Sequences

# Tokens of three requests in each step. The second begins late, the third pauses, and rows are used again by padding.
STEPS = ((7, 0, 1), (1, 70, 0), (0, 1, 2), (5, 1, 1))
ROWS = (3, 0, 2)
LENGTHS = tuple(map(sum, zip(*STEPS, strict=True)))
LONGEST = max(LENGTHS)


def in_steps(whole: list[list[torch.Tensor]]) -> list[tuple[list[torch.Tensor], Sequences]]:
    """Return the packed inputs of each step, followed by a padding row, and its sequences. whole: inputs of each
    request."""
    steps, done = [], [0, 0, 0]
    for counts in STEPS:
        requests = [number for number in range(3) if counts[number]]
        parts = [[x[done[n] : done[n] + counts[n]] for x in whole[n]] for n in requests]
        packed = [torch.cat([*columns, torch.full_like(columns[0][:1], NAN)]) for columns in zip(*parts, strict=True)]
        lens = [counts[n] for n in requests]
        done = [before + count for before, count in zip(done, counts, strict=True)]
        sequences = Sequences(
            torch.tensor([*(ROWS[n] for n in requests), -1]).int(),
            torch.tensor([0, *lens, 1]).cumsum(0).int(),
            torch.tensor([*(done[n] for n in requests), 0]).int(),
            torch.tensor([0, max(*lens, 1), LONGEST]).int(),
        )
        steps.append((packed, sequences))
    return steps


def unpacked(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs of each request; those of padding must be zeros."""
    found: list[list[torch.Tensor]] = [[], [], []]
    for counts, out_T in zip(STEPS, outputs, strict=True):
        *parts, padding = out_T.split([*filter(None, counts), 1])
        assert not padding.any()
        for number, part in zip([n for n in range(3) if counts[n]], parts, strict=True):
            found[number].append(part)
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_convolutions_in_steps_are_those_of_whole_sequences(width: int, activation: str | None) -> None:
    generator = torch.Generator().manual_seed(width)
    weight_DW = torch.randn(12, width, generator=generator)
    bias_D = torch.randn(12, generator=generator) if activation else None
    whole = [[torch.randn(length, 12, generator=generator)] for length in LENGTHS]
    state_SDN = torch.full((4, 12, width - 1), NAN)
    outputs = []
    for (x_TD,), sequences in in_steps(whole):
        outputs.append(torch.full_like(x_TD, NAN))
        convolve(x_TD, weight_DW, bias_D, activation or "", None, None, state_SDN, outputs[-1], *sequences)
    for (x_TD,), found_TD in zip(whole, unpacked(outputs), strict=True):
        expected = modeling_qwen3_next.causal_conv1d_fn(x_TD.T[None], weight_DW, bias_D, activation=activation)
        torch.testing.assert_close(found_TD, expected[0].T)
    assert state_SDN[1].isnan().all()
    for row, (x_TD,) in zip(ROWS, whole, strict=True):
        for position in range(max(0, len(x_TD) - width + 1), len(x_TD)):
            assert torch.equal(state_SDN[row, :, position % (width - 1)], x_TD[position])


@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_a_convolution_are_those_around_it(dtype: torch.dtype, activation: str) -> None:
    for step in STEPS_OF_CASES:
        (x_TD, weight_DW, bias_D, _, factor_TD, gate_TD, state_SDN, _), sequences = convolution(step, 2, dtype)
        expected, found = torch.full_like(factor_TD, NAN), torch.full_like(factor_TD, NAN)
        states = state_SDN, state_SDN.clone()
        around = weight_DW, bias_D, activation
        convolve(x_TD * factor_TD, *around, None, None, states[0], expected, *sequences)
        convolve(x_TD, *around, factor_TD, gate_TD, states[1], found, *sequences)
        assert torch.equal(found, expected * gate_TD)
        assert torch.equal(states[1].nan_to_num(), states[0].nan_to_num())


@pytest.mark.parametrize("group", [1, 2])
def test_delta_rules_in_steps_are_those_of_whole_sequences(group: int) -> None:
    generator = torch.Generator().manual_seed(group)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    whole = [
        [
            normal(n, 2, 16),
            normal(n, 2, 16),
            normal(n, 2 * group, 24),
            -normal(n, 2 * group).abs(),
            normal(n, 2 * group),
        ]
        for n in LENGTHS
    ]
    whole = [[*operands, beta_TH.sigmoid()] for *operands, beta_TH in whole]
    state_SHkv = torch.full((4, 2 * group, 16, 24), NAN)
    outputs = []
    for operands, sequences in in_steps(whole):
        outputs.append(torch.full_like(operands[2], NAN))
        apply_rule(*operands, True, state_SHkv, None, None, outputs[-1], *sequences)
    for number, (q, k, v, g, beta) in enumerate(whole):
        batch = [x[None] for x in (q.repeat_interleave(group, 1), k.repeat_interleave(group, 1), v)]
        expected, state = modeling_qwen3_next.torch_recurrent_gated_delta_rule(
            *batch, g=g[None], beta=beta[None], output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        torch.testing.assert_close(unpacked(outputs)[number], expected[0], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(state_SHkv[ROWS[number]], state[0], rtol=2e-5, atol=2e-5)
    assert state_SHkv[1].isnan().all()


def test_decays_by_element_in_steps_are_those_of_whole_sequences() -> None:
    """Some elements hardly decay, others vanish within a token, so exp of a difference of sums would overflow."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    whole = [
        [normal(n, 2, 16), normal(n, 2, 16), normal(n, 2, 24), -normal(n, 2, 16).mul(4).exp(), normal(n, 2).sigmoid()]
        for n in LENGTHS
    ]
    state_SHkv = torch.full((4, 2, 16, 24), NAN)
    outputs = []
    for operands, sequences in in_steps(whole):
        outputs.append(torch.full_like(operands[2], NAN))
        apply_rule(*operands, True, state_SHkv, None, None, outputs[-1], *sequences)
    for number, operands in enumerate(whole):
        expected, state = modeling_kimi_linear.recurrent_kimi_delta_attention(
            *(x[None] for x in operands), None, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        torch.testing.assert_close(unpacked(outputs)[number], expected[0], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(state_SHkv[ROWS[number]], state[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("groups", "limits"), [(1, (0.0, math.inf)), (2, (0.02, 1.5))])
def test_scans_in_steps_are_those_of_whole_sequences(groups: int, limits: tuple[float, float]) -> None:
    generator = torch.Generator().manual_seed(groups)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    whole = [[normal(n, 4, 24), normal(n, 4), normal(n, groups, 16), normal(n, groups, 16)] for n in LENGTHS]
    A_H, D_H, dt_bias_H = -torch.arange(1.0, 5), normal(4), torch.linspace(-7, 1, 4)
    least, most = limits[0], None if math.isinf(limits[1]) else limits[1]
    state_SHkv = torch.full((4, 4, 16, 24), NAN)
    outputs = []
    for (x_THv, dt_TH, B_TGk, C_TGk), sequences in in_steps(whole):
        outputs.append(torch.full_like(x_THv, NAN))
        operands = x_THv, dt_TH, A_H, B_TGk, C_TGk, D_H, dt_bias_H, least, most
        scan(*operands, state_SHkv, None, None, outputs[-1], *sequences)
    for number, (x, dt, B, C) in enumerate(whole):
        expected, state = modeling_mamba2.mamba2_chunk_scan(
            x[None],
            dt[None],
            A_H,
            B[None],
            C[None],
            **{"chunk_size": 8, "D": D_H, "dt_bias": dt_bias_H, "dt_softplus": True, "dt_limit": limits},
            return_final_states=True,
        )
        torch.testing.assert_close(unpacked(outputs)[number], expected[0], rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(state_SHkv[ROWS[number]], state[0].mT, rtol=2e-5, atol=2e-5)
    assert state_SHkv[1].isnan().all()


@loops_to_a_loaded_bound
def test_kernels_equal_their_references_in_the_interpreter() -> None:
    run = interpret(__file__, "-c", "import interpreter, recurrence_cases; recurrence_cases.main()")
    assert run.stdout.strip() == "equal", run.stderr[-2000:]


@pytest.mark.gpu
def test_kernels_equal_their_references_on_a_gpu() -> None:
    check_all(torch.device("cuda"), 6)
