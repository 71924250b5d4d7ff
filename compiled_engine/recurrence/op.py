"""Custom ops for recurrences: short convolutions, gated delta rules and scans of state space models.

They update each request's state in place.

The ops mutate their arguments, so the graph is split at them. As for attention (compiled_engine/attention/op.py), a
trace of transformers' code calls functional stand-ins, which the pass `recurrences` replaces by the mutating ops.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from compiled_engine.attention.op import call_directly
from compiled_engine.recurrence.convolution import convolve_reference
from compiled_engine.recurrence.delta_rule import apply_rule_reference
from compiled_engine.recurrence.matrix_states import Drafted
from compiled_engine.recurrence.sequences import Sequences
from compiled_engine.recurrence.state_space import scan_reference

_SEQUENCES = ", ".join(f"Tensor {name}" for name in Sequences._fields)


def convolve(
    x_TD: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor | None,
    activation: str,
    factor_TD: torch.Tensor | None,
    gate_TD: torch.Tensor | None,
    state_SDN: torch.Tensor,
    out_TD: torch.Tensor,
    rows_R: torch.Tensor,
    query_start_loc_R1: torch.Tensor,
    seq_lens_R: torch.Tensor,
    host_3: torch.Tensor,
    invariant: bool = False,
) -> None:
    """Write activation(conv(x * factor) + bias) * gate to `out_TD`, where conv is a causal depthwise convolution.

    factor, bias and gate may be None. Each of factor, bias, activation and gate rounds its result to the dtype of x.
    weight_DW: W weights per channel; the last one applies to the token itself.
    state_SDN: for each of S rows, the last N inputs of the convolution, that of position p in slot p modulo N; updated
        in place. N is W - 1, and one more for each draft that a step may have for a request.
    out_TD: padding tokens get zeros.
    activation: "silu", or "" for none. rows_R, query_start_loc_R1, seq_lens_R, host_3: the fields of Sequences.
    invariant: compute each token by the same operations in the same order, whatever tokens the step has, bit for bit.
    """
    sequences = Sequences(rows_R, query_start_loc_R1, seq_lens_R, host_3)
    if x_TD.device.type == "cpu":
        run = convolve_reference
    else:
        from compiled_engine.recurrence.convolution_triton import convolve_triton as run  # Triton is optional
    run(x_TD, weight_DW, bias_D, activation, factor_TD, gate_TD, state_SDN, out_TD, sequences, invariant)


def apply_rule(
    q_TGk: torch.Tensor,
    k_TGk: torch.Tensor,
    v_THv: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    normalises: bool,
    state_SHkv: torch.Tensor,
    drafts_SHNw: torch.Tensor | None,
    lengths_SHv: torch.Tensor | None,
    out_THv: torch.Tensor,
    rows_R: torch.Tensor,
    query_start_loc_R1: torch.Tensor,
    seq_lens_R: torch.Tensor,
    host_3: torch.Tensor,
    invariant: bool = False,
) -> None:
    """Apply the gated delta rule, see delta_rule.py, and write the results to `out_THv`; padding tokens get zeros.

    H / G consecutive value heads share each query and key head. g_TH: [T, H], or [T, H, k] with a decay for each
    element of a key (Kimi delta attention), none of which may then be positive. Queries are divided by the square root
    of their head size. normalises: first divide each query and key by its L2 norm. state_SHkv: fp32, a state for each
    of S rows; updated in place. drafts_SHNw, lengths_SHv: the fields of Drafted (see matrix_states.py, also for the
    letters), updated in place; None in an engine without drafts. rows_R and the arguments after it: those of
    `convolve`; with `invariant`, tokens are processed one by one.
    """
    sequences, drafted = Sequences(rows_R, query_start_loc_R1, seq_lens_R, host_3), _drafted(drafts_SHNw, lengths_SHv)
    if v_THv.device.type == "cpu":
        run = apply_rule_reference
    else:
        from compiled_engine.recurrence.delta_rule_triton import apply_rule_triton as run  # Triton is optional
    operands = q_TGk, k_TGk, v_THv, g_TH, beta_TH, normalises
    run(*operands, state_SHkv, drafted, out_THv, sequences, invariant)


def scan(
    x_THv: torch.Tensor,
    dt_TH: torch.Tensor,
    A_H: torch.Tensor,
    B_TGk: torch.Tensor,
    C_TGk: torch.Tensor,
    D_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    least_dt: float,
    most_dt: float | None,
    state_SHkv: torch.Tensor,
    drafts_SHNw: torch.Tensor | None,
    lengths_SHv: torch.Tensor | None,
    out_THv: torch.Tensor,
    rows_R: torch.Tensor,
    query_start_loc_R1: torch.Tensor,
    seq_lens_R: torch.Tensor,
    host_3: torch.Tensor,
    invariant: bool = False,
) -> None:
    """Scan tokens as Mamba 2 does, see state_space.py, and write the results to `out_THv`; padding tokens get zeros.

    H / G consecutive heads share B and C. The step sizes are softplus(dt + dt_bias), not below least_dt and not above
    most_dt, which may be None; the softplus, the state and the result are computed in fp32. Other arguments: those of
    `apply_rule`.
    """
    sequences, drafted = Sequences(rows_R, query_start_loc_R1, seq_lens_R, host_3), _drafted(drafts_SHNw, lengths_SHv)
    if x_THv.device.type == "cpu":
        run = scan_reference
    else:
        from compiled_engine.recurrence.state_space_triton import scan_triton as run  # Triton is optional
    operands = x_THv, dt_TH, A_H, B_TGk, C_TGk, D_H, dt_bias_H, least_dt, most_dt
    run(*operands, state_SHkv, drafted, out_THv, sequences, invariant)


def _drafted(drafts_SHNw: torch.Tensor | None, lengths_SHv: torch.Tensor | None) -> Drafted | None:
    if drafts_SHNw is None:
        return None
    assert lengths_SHv is not None
    return Drafted(drafts_SHNw, lengths_SHv)


def _returns_nothing(*arguments: object) -> None:
    """Implement the ops for fake tensors: do nothing, since the ops return nothing."""


def _never_executed(*arguments: object) -> NoReturn:
    raise RuntimeError("the values of recurrences exist only in traces and cannot be executed")


def _like(index: int) -> Callable[..., torch.Tensor]:
    def fake(*arguments: Any) -> torch.Tensor:
        return torch.empty_like(arguments[index], memory_format=torch.contiguous_format)

    return fake


def _define(name: str, function: Callable[..., None], arguments: str, states: str, out: str, like: int) -> Any:
    """Define the op `name`, which updates its states and writes to `out`, and its functional stand-in `name`_value.

    The stand-in returns the result instead of writing it, and lacks the argument `invariant`. function: the op's
    implementation. arguments: the schema of the arguments that come first in both. states: the schema of the states
    that the op updates. like: index of the argument whose shape and dtype the result has. Returns the op.
    """
    names = [argument.split()[-1] for argument in states.split(", ")]
    schema = f"({arguments}, {states}, Tensor(z!) {out}, {_SEQUENCES}, bool invariant=False) -> ()"
    op = torch.library.custom_op(f"compiled_engine::{name}", function, mutates_args=(*names, out), schema=schema)
    op.register_fake(_returns_nothing)
    schema = f"({arguments}, {re.sub(r'[(].![)]', '', states)}, {_SEQUENCES}) -> Tensor"
    value = torch.library.custom_op(f"compiled_engine::{name}_value", _never_executed, mutates_args=(), schema=schema)
    value.register_fake(_like(like))
    return op


conv_state_op = _define(
    "conv_state",
    convolve,
    "Tensor x_TD, Tensor weight_DW, Tensor? bias_D, str activation, Tensor? factor_TD, Tensor? gate_TD",
    states="Tensor(a!) state_SDN",
    out="out_TD",
    like=0,
)
_MATRIX_STATES = "Tensor(a!) state_SHkv, Tensor(b!)? drafts_SHNw, Tensor(c!)? lengths_SHv"
delta_rule_op = _define(
    "delta_rule",
    apply_rule,
    "Tensor q_TGk, Tensor k_TGk, Tensor v_THv, Tensor g_TH, Tensor beta_TH, bool normalises",
    states=_MATRIX_STATES,
    out="out_THv",
    like=2,
)
state_space_op = _define(
    "state_space",
    scan,
    "Tensor x_THv, Tensor dt_TH, Tensor A_H, Tensor B_TGk, Tensor C_TGk, Tensor D_H, Tensor dt_bias_H, "
    "float least_dt, float? most_dt",
    states=_MATRIX_STATES,
    out="out_THv",
    like=0,
)

CONV_STATE = torch.ops.compiled_engine.conv_state.default
CONV_STATE_VALUE = torch.ops.compiled_engine.conv_state_value.default
DELTA_RULE = torch.ops.compiled_engine.delta_rule.default
DELTA_RULE_VALUE = torch.ops.compiled_engine.delta_rule_value.default
STATE_SPACE = torch.ops.compiled_engine.state_space.default
STATE_SPACE_VALUE = torch.ops.compiled_engine.state_space_value.default
# Functions by op name, which the compiled forward calls directly, without torch's dispatcher.
RECURRENCE_OPS: dict[str, Callable[..., None]] = {
    "compiled_engine::conv_state": convolve,
    "compiled_engine::delta_rule": apply_rule,
    "compiled_engine::state_space": scan,
}
call_directly(RECURRENCE_OPS)
# For each functional stand-in: the op, the name of the op's result, and of the argument with the same shape.
VALUES = {
    CONV_STATE_VALUE: (CONV_STATE, "out_TD", "x_TD"),
    DELTA_RULE_VALUE: (DELTA_RULE, "out_THv", "v_THv"),
    STATE_SPACE_VALUE: (STATE_SPACE, "out_THv", "x_THv"),
}


def conv_state_or_value(
    x_TD: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor | None,
    activation: str,
    state_SDN: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """Run `convolve` without factor and gate, and return its result [T, D].

    In a trace, the op's functional stand-in is called instead.
    """
    operands = x_TD, weight_DW, bias_D, activation, None, None, state_SDN
    if torch.compiler.is_compiling():
        return torch.ops.compiled_engine.conv_state_value(*operands, *sequences)
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    torch.ops.compiled_engine.conv_state(*operands, out_TD, *sequences)
    return out_TD


def delta_rule_or_value(
    q_TGk: torch.Tensor,
    k_TGk: torch.Tensor,
    v_THv: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    normalises: bool,
    state_SHkv: torch.Tensor,
    drafted: Drafted | None,
    sequences: Sequences,
) -> torch.Tensor:
    """Run `apply_rule` and return its result [T, H, v]. In a trace, the op's functional stand-in is called instead."""
    states = (state_SHkv, None, None) if drafted is None else (state_SHkv, *drafted)
    operands = q_TGk, k_TGk, v_THv, g_TH, beta_TH, normalises, *states
    if torch.compiler.is_compiling():
        return torch.ops.compiled_engine.delta_rule_value(*operands, *sequences)
    out_THv = torch.empty_like(v_THv, memory_format=torch.contiguous_format)
    torch.ops.compiled_engine.delta_rule(*operands, out_THv, *sequences)
    return out_THv


def state_space_or_value(
    x_THv: torch.Tensor,
    dt_TH: torch.Tensor,
    A_H: torch.Tensor,
    B_TGk: torch.Tensor,
    C_TGk: torch.Tensor,
    D_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    least_dt: float,
    most_dt: float | None,
    state_SHkv: torch.Tensor,
    drafted: Drafted | None,
    sequences: Sequences,
) -> torch.Tensor:
    """Run `scan` and return its result [T, H, v]. In a trace, the op's functional stand-in is called instead."""
    states = (state_SHkv, None, None) if drafted is None else (state_SHkv, *drafted)
    operands = x_THv, dt_TH, A_H, B_TGk, C_TGk, D_H, dt_bias_H, least_dt, most_dt, *states
    if torch.compiler.is_compiling():
        return torch.ops.compiled_engine.state_space_value(*operands, *sequences)
    out_THv = torch.empty_like(x_THv, memory_format=torch.contiguous_format)
    torch.ops.compiled_engine.state_space(*operands, out_THv, *sequences)
    return out_THv
